"""Checks the style of this tree: run `python -m tools.tidy` from the root.

A rule is a function of a file's path (relative to the root) and its text that yields the offences;
a tree rule is a function of all files. Rules change nothing, and share only the parsed syntax tree.
`tests/test_tidy.py` tests that each of them can fail.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SLEEPS = "tests/sleeps.txt"
DROPPED_ERRORS = "tools/dropped_errors.txt"
OPENED_FILES = "tools/opened_files.txt"
# These two files contain the words that they forbid.
OWN_FILES = frozenset({"tools/tidy.py", "tests/test_tidy.py"})

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600
TEST_MODULE_LINES_MAX = 800
# The word in the first paragraph of a longer module that introduces the reason.
LENGTH_REASON = re.compile(r"\blong\b", re.IGNORECASE)
TEST_NAME_WORDS_MIN = 3


class Offence(NamedTuple):
    """One line that breaks a rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


Rule = Callable[[str, str], Iterator[Offence]]
TreeRule = Callable[[Mapping[str, str]], Iterator[Offence]]


@lru_cache(maxsize=2048)
def parse(text: str) -> ast.Module:
    """Parse Python source once for all the rules that need it."""
    return ast.parse(text)


@lru_cache(maxsize=8)
def nodes_of(text: str) -> list[ast.AST]:
    """Every node of Python source, cached, because walking a tree takes longer than most rules."""
    return list(ast.walk(parse(text)))


def in_src(path: str) -> bool:
    """Say whether the path is a Python module of the package."""
    return path.startswith("src/") and path.endswith(".py")


def in_tests(path: str) -> bool:
    """Say whether the path is a Python module of the tests."""
    return path.startswith("tests/") and path.endswith(".py")


# The glossary gives every concept one word; these are other words for them, each with the word to
# use instead and the places where it is allowed.
SQS_PLACES = ("src/penstock/wire/sqs/", "src/penstock/backends/sqs/")
BANNED_WORDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("job jobs", "task", ()),
    ("lease leases leased", "claim", ()),
    ("ack acks acked nack nacks nacked", "delete or release", ("carrot",)),
    ("record records", "entry or event", ()),
    # The context of a function has the names that it has in Lambda.
    (
        "log logs wal",
        "journal",
        (
            "src/penstock/cluster/log.py",
            "src/penstock/settings.py",
            "src/penstock/functions/runner.py",
        ),
    ),
    ("handle handles", "receipt, or a plainer verb", SQS_PLACES),
    ("manager managers", "the thing it keeps", ()),
)
BANNED_FORMS = {
    form: (instead, places) for forms, instead, places in BANNED_WORDS for form in forms.split()
}
# Names that do not describe a class or module.
EMPTY_WORDS = frozenset({"base", "common", "helper", "helpers", "misc", "util", "utils"})
# Established phrases with banned words that prose may use.
FOREIGN_PHRASES = re.compile(r"replicated log|context manager|event logs?", re.IGNORECASE)
GLOSSARY = "docs/reference/glossary.md"


def words_of(identifier: str) -> list[str]:
    """Split snake_case and CamelCase into lower-case words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", identifier)
    return spaced.lower().split()


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every name that this code defines, with its line; not those it only uses."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def banned_identifiers(path: str, text: str) -> Iterator[Offence]:
    """One word per concept: no name in the package uses another word for it."""
    if not in_src(path):
        return
    names = [(1, Path(path).stem), *bound_names(parse(text))]
    for line, name in names:
        for word in words_of(name):
            offence = banned_word(path, word)
            if offence:
                yield Offence(path, line, f"name {name!r}: {offence}")


def banned_word(path: str, word: str) -> str | None:
    """Return why this word may not be used in this file, or None."""
    instead, places = BANNED_FORMS.get(word.lower(), ("", ()))
    if not instead or any(place in path for place in places):
        return None
    return f"not {word!r} but {instead}"


def empty_names(path: str, text: str) -> Iterator[Offence]:
    """No class or module is called a helper, a base or common."""
    if not in_src(path):
        return
    names = [(1, Path(path).stem)]
    names += [(n.lineno, n.name) for n in nodes_of(text) if isinstance(n, ast.ClassDef)]
    for line, name in names:
        empty = EMPTY_WORDS.intersection(words_of(name))
        if empty:
            yield Offence(path, line, f"{name!r} does not say what it is ({', '.join(empty)})")


def banned_prose(path: str, text: str) -> Iterator[Offence]:
    """The docs use the words of the glossary; code spans and blocks may contain others."""
    if not path.endswith(".md") or path == GLOSSARY:
        return
    for number, line in prose_lines(text):
        for word in re.findall(r"[A-Za-z]+", FOREIGN_PHRASES.sub("", line)):
            offence = banned_word(path, word)
            if offence:
                yield Offence(path, number, offence)


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield a Markdown document's lines without fenced blocks, code spans and link targets."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", line)


UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def unfinished_marks(path: str, text: str) -> Iterator[Offence]:
    """Open work is listed in docs/roadmap.md and not marked in the code."""
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield Offence(path, number, "unfinished work belongs in docs/roadmap.md")


def long_functions(path: str, text: str) -> Iterator[Offence]:
    """A function fits on a screen."""
    if not path.endswith(".py"):
        return
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                complaint = f"{node.name} has {count} lines, at most {FUNCTION_LINES_MAX}"
                yield Offence(path, node.lineno, complaint)


def long_modules(path: str, text: str) -> Iterator[Offence]:
    """A module is one idea; a longer one is split, or gives the reason in its docstring."""
    count = text.count("\n")
    if in_src(path):
        docstring = ast.get_docstring(parse(text)) or ""
        if count > MODULE_LINES_MAX and not LENGTH_REASON.search(docstring.split("\n\n")[0]):
            yield Offence(
                path,
                1,
                f"{count} lines, at most {MODULE_LINES_MAX}, unless the first paragraph of its "
                "docstring says why it is long",
            )
    elif path.endswith(".py") and count > TEST_MODULE_LINES_MAX:
        yield Offence(path, count, f"{count} lines, at most {TEST_MODULE_LINES_MAX}")


BANNER = re.compile(r"#\s*([-=#*~_─═━])\1{3,}|.*([-=#*~_─═━])\2{3,}\s*$")

# Only files with such a line are tokenized, because that is slow.
BANNER_LINE = re.compile(r"#.*([-=#*~_─═━])\1{3,}")


def banner_comments(path: str, text: str) -> Iterator[Offence]:
    """A module that needs banner comments is split into two."""
    if not path.endswith(".py") or not BANNER_LINE.search(text):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and BANNER.match(token.string):
            yield Offence(path, token.start[0], "banner comment")


def module_docstrings(path: str, text: str) -> Iterator[Offence]:
    """A module begins with one sentence that describes it."""
    if not in_src(path):
        return
    docstring = ast.get_docstring(parse(text))
    if docstring is None:
        yield Offence(path, 1, "no module docstring")
        return
    first = docstring.splitlines()[0]
    if not re.fullmatch(r"\S.*\s\S+\.", first) or first[0].islower():
        yield Offence(path, 1, f"the first line of the docstring is not a sentence: {first!r}")


# What a function's docstring would begin with in another mood: it says what the function does.
COMMANDING = frozenset(
    {"Accept", "Add", "Append", "Begin", "Close", "Create", "Drop", "Extend", "Finish"}
    | {"Keep", "Let", "Make", "Prepare", "Raise"}
    | {"Remove", "Return", "Stop", "Sync", "Take", "Unlink", "Write", "Yield"}
)


def commanding_docstrings(path: str, text: str) -> Iterator[Offence]:
    """The docstrings of the package have one mood: "Returns the name", not "Return the name"."""
    if not in_src(path):
        return
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or " "
            first = docstring.split(" ")[0]
            if first in COMMANDING:
                complaint = f"docstring of {node.name}: not {first!r}, but what it does: {first}s"
                yield Offence(path, node.lineno, complaint)


# The module that escapes what is written for people, and the logger of the functions that are
# tasks, which decide themselves what they write.
PRINTING_PLACES = ("src/penstock/output.py", "src/penstock/tasks/context.py")
OTHER_LOGGERS = ("aiormq",)
PRINTING_CALLS = frozenset(
    {"print", "breakpoint", "sys.stdout.write", "sys.stderr.write", "logging.getLogger"}
)


def prints(path: str, text: str) -> Iterator[Offence]:
    """Text for people is written where it is escaped."""
    if not in_src(path) or path.startswith(PRINTING_PLACES):
        return
    for node in nodes_of(text):
        if not isinstance(node, ast.Call) or dotted(node.func) not in PRINTING_CALLS:
            continue
        # A logger of another package, of which settings are changed.
        name = node.args[0] if node.args else None
        if not (isinstance(name, ast.Constant) and name.value in OTHER_LOGGERS):
            complaint = f"{dotted(node.func)}() does not escape; use penstock.output"
            yield Offence(path, node.lineno, complaint)


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for the expression a.b.c, and an empty string for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


DANGEROUS_MODULES = frozenset(
    {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
)
DANGEROUS_CALLS = frozenset(
    {"eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"}
    | {"yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.full_load_all"}
)


def dangerous_code(path: str, text: str) -> Iterator[Offence]:
    """Input is never executed as code."""
    if not in_src(path):
        return
    for node in nodes_of(text):
        match node:
            case ast.Import(names=names):
                found = {alias.name.split(".")[0] for alias in names} & DANGEROUS_MODULES
            case ast.ImportFrom(module=str(module)):
                found = {module.split(".")[0]} & DANGEROUS_MODULES
            case ast.Call(func=func):
                found = {dotted(func)} & DANGEROUS_CALLS
            case _:
                continue
        for name in sorted(found):
            yield Offence(path, node.lineno, f"{name} can turn bytes into code")


BUILD_OUTPUT = re.compile(
    r"(^|/)(__pycache__|\.venv|build|dist|node_modules|htmlcov|spark-warehouse|metastore_db"
    r"|\.(mypy|ruff|pytest|import_linter)_cache|\.hypothesis|[^/]+\.egg-info)/"
    r"|\.(py[cod]|so|o|whl|class|jar)$|(^|/)(\.coverage|derby\.log|\.DS_Store)$"
)


def build_output(path: str, text: str) -> Iterator[Offence]:
    """Generated files are not kept in git."""
    if BUILD_OUTPUT.search(path):
        yield Offence(path, 1, "build output in git")


MACHINE_PATH = re.compile(r"(?<![\w.:/~$}-])/(?:work|root|home/\w+|Users/\w+)(?![\w-])")
REGISTRY = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|registry\.npmjs\.org|npmjs\.com|deb\.debian\.org"
    r"|ghcr\.io|quay\.io|docker\.io|crates\.io|repo1?\.maven\.(?:org|apache\.org)|conda\.anaconda\.org)\b"
    r"|(?:extra-)?index-url|find-links",
)


def machine_paths(path: str, text: str) -> Iterator[Offence]:
    """A tracked file works on any machine: it names no home directory and no registry."""
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield Offence(path, number, "a path of one machine")
        if REGISTRY.search(line):
            yield Offence(path, number, "a package registry's host or setting")


def test_names(path: str, text: str) -> Iterator[Offence]:
    """A test's name is a sentence about behaviour."""
    if not in_tests(path):
        return
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = words_of(node.name)
            if words[:1] == ["test"] and len(words) - 1 < TEST_NAME_WORDS_MIN:
                yield Offence(path, node.lineno, f"{node.name} is not a sentence")


# What tests of the pipeline read of a shell's words and of a listener has no public name yet.
PRIVATE_IMPORT_PLACES = ("tests/spark/test_bad_input.py", "tests/spark/test_warm.py")


def private_imports(path: str, text: str) -> Iterator[Offence]:
    """A test imports no private name of the package: renaming one breaks no test."""
    if not in_tests(path) or path in PRIVATE_IMPORT_PLACES:
        return
    for node in nodes_of(text):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "penstock":
            for alias in node.names:
                if alias.name.startswith("_") and not alias.name.startswith("__"):
                    yield Offence(path, node.lineno, f"{alias.name} is private to {node.module}")


def sleeps(path: str, text: str) -> Iterator[Offence]:
    """A test advances a manual clock or waits for an event; it does not sleep."""
    if not in_tests(path):
        return
    allowed = sleeping_tests()
    for function, node in calls_by_function(parse(text)):
        if is_sleep(node) and f"{path}::{function}" not in allowed:
            complaint = f"{function} sleeps; use a manual clock, an event, or a line in {SLEEPS}"
            yield Offence(path, node.lineno, complaint)


def dropped_errors(path: str, text: str) -> Iterator[Offence]:
    """Only listed functions end an error of unknown kind: whoever cannot act on it passes it on."""
    if not in_src(path) or "PenstockError" not in text:
        return
    allowed = permissions((ROOT / DROPPED_ERRORS).read_text())
    for function, node in nodes_by_function(parse(text)):
        if drops_errors(node) and f"{path}::{function}" not in allowed:
            yield Offence(
                path,
                node.lineno,
                f"{function} drops every PenstockError; catch the kinds it can act on, pass the "
                f"error on, or add a line in {DROPPED_ERRORS}",
            )


def drops_errors(node: ast.AST) -> bool:
    """Say whether this code catches every PenstockError, and neither uses it nor raises."""
    match node:
        case ast.ExceptHandler(type=kind, name=name, body=body) if kind is not None:
            inside = [each for line in body for each in ast.walk(line)]
            uses = any(isinstance(each, ast.Name) and each.id == name for each in inside)
            raises = any(isinstance(each, ast.Raise) for each in inside)
            return names_every_error(kind) and not (uses or raises)
        case ast.Call(func=func, args=kinds) if dotted(func).endswith("suppress"):
            return any(map(names_every_error, kinds))
    return False


def names_every_error(kind: ast.expr) -> bool:
    """Say whether the exceptions of this expression include PenstockError itself."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(dotted(each).endswith("PenstockError") for each in kinds)


# The module that opens paths; tests use directories that they have just made.
OPENING_PLACES = ("src/penstock/files.py",)
OPENING_CALLS = frozenset(
    {"open", "io.open", "os.open", "os.mkdir", "os.makedirs", "os.link", "os.symlink", "os.mkfifo"}
)
OPENING_METHODS = frozenset(
    {"read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "touch"}
    | {"symlink_to", "hardlink_to"}
)
OPENING_MODE = re.compile(r"[rwxa][bt+]*")


def opened_files(path: str, text: str) -> Iterator[Offence]:
    """Paths are opened where it is checked whose they are; listed functions have a reason."""
    if not in_src(path) or path.startswith(OPENING_PLACES):
        return
    allowed = permissions((ROOT / OPENED_FILES).read_text())
    for function, node in nodes_by_function(parse(text)):
        if opens_path(node) and f"{path}::{function}" not in allowed:
            complaint = f"{function} opens a path; use penstock.files, or a line in {OPENED_FILES}"
            yield Offence(path, node.lineno, complaint)


def opens_path(node: ast.AST) -> bool:
    """Say whether the call opens or makes a file or directory by its path."""
    if not isinstance(node, ast.Call):
        return False
    first = node.args[0] if node.args else None
    if dotted(node.func) in OPENING_CALLS:
        return first is None or dotted(first) != "os.devnull"
    match node.func, first:
        case ast.Attribute(attr="open"), ast.Constant(value=str(mode)):
            return OPENING_MODE.fullmatch(mode) is not None
        case ast.Attribute(attr=name), _:
            return name in OPENING_METHODS
    return False


def is_sleep(call: ast.Call) -> bool:
    """Say whether the call waits for the wall clock; `asyncio.sleep(0)` only yields."""
    if dotted(call.func) not in {"time.sleep", "asyncio.sleep", "sleep"}:
        return False
    return not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0)


def calls_by_function(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call with the name of the outermost function that contains it."""
    for function, node in nodes_by_function(tree):
        if isinstance(node, ast.Call):
            yield function, node


def nodes_by_function(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.ExceptHandler]]:
    """Yield expressions and handlers with the name of the outermost function that has them."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.ExceptHandler]]:
        if isinstance(node, ast.expr | ast.ExceptHandler):
            yield function, node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = function or node.name
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, "")


@lru_cache(maxsize=1)
def sleeping_tests() -> dict[str, str]:
    """Return the functions that may sleep, with the reasons."""
    return permissions((ROOT / SLEEPS).read_text())


def permissions(text: str) -> dict[str, str]:
    """Read lines of the form `path::function: the reason`."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parts = [line.partition(": ") for line in lines]
    return {place.rstrip(":"): reason.strip() for place, _, reason in parts}


def idle_permissions(path: str, text: str) -> Iterator[Offence]:
    """A permission gives its reason, and is removed together with what it permits."""
    if path not in PERMITTED:
        return
    does, complaint = PERMITTED[path]
    for place, reason in permissions(text).items():
        module, _, function = place.partition("::")
        source = (ROOT / module).read_text() if (ROOT / module).is_file() else ""
        if function not in {name for name, node in nodes_by_function(parse(source)) if does(node)}:
            yield Offence(path, 1, f"{place} {complaint}")
        if not reason:
            yield Offence(path, 1, f"{place} gives no reason")


# The files with permissions: what each permits, and what is said where it is not done.
PERMITTED: Mapping[str, tuple[Callable[[ast.AST], bool], str]] = {
    SLEEPS: (lambda node: isinstance(node, ast.Call) and is_sleep(node), "does not sleep"),
    DROPPED_ERRORS: (drops_errors, "drops no PenstockError"),
    OPENED_FILES: (opens_path, "opens no path"),
}


def unique_classes(files: Mapping[str, str]) -> Iterator[Offence]:
    """A class name is unique in the package, its tests and benchmarks, also a private one."""
    seen: dict[str, str] = {}
    for path, text in sorted(files.items()):
        for node in classes_of(path, text):
            first = seen.setdefault(node.name, f"{path}:{node.lineno}")
            if first != f"{path}:{node.lineno}":
                complaint = f"class {node.name} has the name of the one in {first}"
                yield Offence(path, node.lineno, complaint)


def classes_of(path: str, text: str) -> list[ast.ClassDef]:
    """The classes of a Python file; none if it is not valid Python."""
    try:
        nodes = iter(nodes_of(text) if path.endswith(".py") else ())
    except SyntaxError:
        return []
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


# Verbs that had many meanings: how many functions of the package may be named just so. The glossary
# has the meaning of each; a new function needs another name, or a reason for a higher number.
VERB_LIMITS = {"settle": 5, "take": 6}


def single_meanings(files: Mapping[str, str]) -> Iterator[Offence]:
    """A verb means one thing: few functions are named by it alone."""
    found: dict[str, list[tuple[str, int]]] = {verb: [] for verb in VERB_LIMITS}
    for path, text in sorted(files.items()):
        if in_src(path):
            for node in nodes_of(text):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.get(node.name.lstrip("_"), []).append((path, node.lineno))
    for verb, places in found.items():
        for path, line in places[VERB_LIMITS[verb] :]:
            complaint = f"{verb} is the name of {len(places)} functions, at most"
            yield Offence(path, line, f"{complaint} {VERB_LIMITS[verb]}; say what this one does")


TREE_RULES: tuple[TreeRule, ...] = (unique_classes, single_meanings)
RULES: tuple[Rule, ...] = (
    banned_identifiers,
    banned_prose,
    empty_names,
    unfinished_marks,
    long_functions,
    long_modules,
    banner_comments,
    module_docstrings,
    commanding_docstrings,
    prints,
    dangerous_code,
    build_output,
    machine_paths,
    test_names,
    private_imports,
    sleeps,
    dropped_errors,
    opened_files,
    idle_permissions,
)


def files() -> list[str]:
    """List the files that git tracks or would track; without git, those of the source trees."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        trees = [ROOT / name for name in ("src", "tests", "docs", "tools")]
        paths = [path for tree in trees for path in tree.rglob("*") if path.is_file()]
        return sorted(str(p.relative_to(ROOT)) for p in paths if "__pycache__" not in p.parts)
    return sorted(set(filter(None, found.stdout.split("\0"))))


def check_file(path: str, text: str) -> Iterator[Offence]:
    """Try every rule on one file."""
    if path.endswith(".py"):
        try:
            parse(text)
        except SyntaxError as error:
            yield Offence(path, error.lineno or 1, f"not Python: {error.msg}")
            return
    for rule in RULES:
        if path not in OWN_FILES or rule not in (unfinished_marks, machine_paths):
            yield from rule(path, text)


def check_tree() -> list[Offence]:
    """Try every rule on every file of the tree; binary files have only a path."""
    offences: list[Offence] = []
    texts: dict[str, str] = {}
    for path in files():
        if (ROOT / path).is_file():
            try:
                texts[path] = (ROOT / path).read_text()
            except UnicodeDecodeError:
                texts[path] = ""
            offences += check_file(path, texts[path])
    return offences + [offence for rule in TREE_RULES for offence in rule(texts)]


def main() -> int:
    """Print every offence; fail if there is one."""
    offences = check_tree()
    for offence in offences:
        print(offence)
    print(f"tidy: {len(offences)} offences" if offences else "tidy: no offences")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
