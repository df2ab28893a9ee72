"""`penstock completion bash|zsh|fish`: a script by which a shell completes commands and options.

The script is made from the parser, so it knows every command, action, option and choice. Names of
queues are asked for when they are needed, by `penstock list`.

    eval "$(penstock completion bash)"             in ~/.bashrc
    eval "$(penstock completion zsh)"              in ~/.zshrc, after compinit
    penstock completion fish | source              in ~/.config/fish/config.fish
"""

import shlex
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.cli.parser import Parser, make_parser
from penstock.cli.session import Session
from penstock.output import Lines

# What a value is, by the name that the help has for it; anything else is not completed.
_QUEUES: Final = "queues"
_FILES: Final = "files"
_KINDS: Final = {"QUEUE": _QUEUES, "FILE": _FILES, "DIR": _FILES, "PATH": _FILES}


class Option(NamedTuple):
    """An option: its names, what the help says, and what its value can be, "" if it has none."""

    names: tuple[str, ...]
    text: str
    takes_value: bool
    value: str


class CommandWords(NamedTuple):
    """What can follow some words, such as `daemon status`: further words, options, values."""

    path: str
    words: dict[str, str]
    options: list[Option]
    # Choices, separated by spaces, or the kind of a value.
    value: str


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("shell", metavar="SHELL", choices=sorted(_SCRIPTS), help="bash, zsh, fish")


def run(session: Session, arguments: Namespace) -> int:
    """Prints the script."""
    session.refuse_option(arguments, "url", "the script asks the store of each line for its queues")
    places = list(places_of(make_parser(), ""))
    session.print_result(
        arguments,
        {"shell": arguments.shell, "script": (script := _SCRIPTS[arguments.shell](places))},
        Lines(script),
    )
    return 0


def places_of(parser: ArgumentParser, path: str) -> Iterator[CommandWords]:
    """What can follow the words of `path`, and what can follow each further word."""
    if isinstance(parser, Parser):
        parser.load()
    words: dict[str, str] = {}
    options = []
    value = ""
    below: list[CommandWords] = []
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            texts = {each.dest: each.help or "" for each in action._choices_actions}
            for name, child in action.choices.items():
                words[name] = texts.get(name, "")
                below += places_of(child, f"{path} {name}")
        elif action.help == SUPPRESS:
            continue
        elif action.option_strings:
            takes_value = action.nargs != 0
            shown = value_of(action) if takes_value else ""
            names = tuple(action.option_strings)
            options.append(Option(names, action.help or "", takes_value, shown))
        else:
            value = value or value_of(action)
    yield CommandWords(path, words, options, value)
    yield from below


def value_of(action: Action) -> str:
    """The choices of an argument, or the kind of its value."""
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    return _KINDS.get(str(action.metavar), "")


_BASH: Final = """\
# Completes penstock in bash; made by: penstock completion bash
_penstock() {
    local line=${COMP_LINE:0:COMP_POINT} cur='' prev='' path_of='' url='' value=''
    local words='' flags='' at
    local -a typed
    read -ra typed <<< "$line"
    if [[ $line == *[[:space:]] ]]; then typed+=(''); fi
    cur=${typed[-1]}
    for ((at = 1; at < ${#typed[@]} - 1; at++)); do
        prev=${typed[at]}
        case $prev in
            --url) ((at + 1 < ${#typed[@]} - 1)) && url=${typed[++at]} ;;
            --url=*) url=${prev#--url=} ;;
            -*) ;;
            *) case "$path_of $prev" in
PATHS
            esac ;;
        esac
    done
    prev=${typed[${#typed[@]} - 2]}
    case "$path_of $prev" in
VALUES
    *)
        case $path_of in
PLACES
        esac
        if [[ $cur == -* || -z $words$value ]]; then words=$flags value=''; fi ;;
    esac
    case $value in
        queues)
            words+=" $(command penstock ${url:+"--url=$url"} list -- "$cur" 2>/dev/null)" ;;
        files) COMPREPLY=($(compgen -f -- "$cur")); compopt -o filenames 2>/dev/null; return ;;
        *) words+=" $value" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -F _penstock penstock"""


def _bash(places: list[CommandWords]) -> str:
    at = []
    for place in places:
        flags = [name for option in place.options for name in option.names]
        at.append(
            f"{shlex.quote(place.path)}) value={shlex.quote(place.value)} "
            f"words={shlex.quote(' '.join(place.words))} flags={shlex.quote(' '.join(flags))} ;;"
        )
    return _filled(_BASH, places, at)


def _filled(script: str, places: list[CommandWords], at: list[str]) -> str:
    """The script of bash or zsh with its three lists."""
    paths = " | ".join(shlex.quote(place.path) for place in places if place.path)
    values = [
        f"    {' | '.join(shlex.quote(f'{place.path} {name}') for name in option.names)}) "
        f"value={shlex.quote(option.value)} ;;"
        for place in places
        for option in place.options
        if option.takes_value
    ]
    return (
        script.replace("PATHS", f'                {paths}) path_of="$path_of $prev" ;;')
        .replace("VALUES", "\n".join(values))
        .replace("PLACES", "\n".join(f"            {each}" for each in at))
    )


_ZSH: Final = """\
#compdef penstock
# Completes penstock in zsh; made by: penstock completion zsh
_penstock() {
    local path_of='' url='' value='' prev='' at
    local -a found flags
    for ((at = 2; at < CURRENT; at++)); do
        prev=${words[at]}
        case $prev in
            --url) ((at + 1 < CURRENT)) && url=${words[++at]} ;;
            --url=*) url=${prev#--url=} ;;
            -*) ;;
            *) case "$path_of $prev" in
PATHS
            esac ;;
        esac
    done
    prev=${words[CURRENT - 1]}
    case "$path_of $prev" in
VALUES
    *)
        case $path_of in
PLACES
        esac ;;
    esac
    [[ $PREFIX == -* ]] && _describe -o option flags
    (( $#found )) && _describe command found
    case $value in
        queues) compadd -- $(command penstock ${url:+"--url=$url"} list -- "$PREFIX" 2>/dev/null) ;;
        files) _files ;;
        ?*) compadd -- ${=value} ;;
    esac
}
compdef _penstock penstock"""


def _zsh(places: list[CommandWords]) -> str:
    at = []
    for place in places:
        named = [(name, option.text) for option in place.options for name in option.names]
        flags = [shlex.quote(f"{name}:{text}") for name, text in named]
        found = [shlex.quote(f"{name}:{text}") for name, text in place.words.items()]
        at.append(
            f"{shlex.quote(place.path)}) value={shlex.quote(place.value)}\n"
            f"                found=({' '.join(found)})\n"
            f"                flags=({' '.join(flags)}) ;;"
        )
    return _filled(_ZSH, places, at)


_FISH: Final = """\
# Completes penstock in fish; made by: penstock completion fish
function __penstock_path
    set -l found ''
    set -l skips 0
    for word in (commandline -opc)[2..-1]
        if test $skips = 1
            set skips 0
        else if test "$word" = --url
            set skips 1
        else if contains -- "$found $word" PATHS
            set found "$found $word"
        end
    end
    echo -- "$found"
end
function __penstock_at
    test (__penstock_path) = "$argv[1]"
end
function __penstock_queues
    set -l words (commandline -opc)
    set -l at (contains -i -- --url $words)
    set -l url
    test -n "$at"; and set url --url $words[(math $at + 1)]
    command penstock $url list -- (commandline -ct) 2>/dev/null
end
complete -c penstock -f"""


def _fish(places: list[CommandWords]) -> str:
    lines = [_FISH.replace("PATHS", " ".join(_quoted(each.path) for each in places if each.path))]
    for place in places:
        start = f"complete -c penstock -n {_quoted(f'__penstock_at {_quoted(place.path)}')}"
        for name, text in place.words.items():
            lines.append(f"{start} -a {_quoted(name)} -d {_quoted(text)}")
        for option in place.options:
            names = [
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            ]
            value = _fish_value(option.value) if option.takes_value else ""
            takes = " -r" if option.takes_value else ""
            lines.append(f"{start} {' '.join(names)}{takes}{value} -d {_quoted(option.text)}")
        if place.value:
            lines.append(f"{start}{_fish_value(place.value)}")
    return "\n".join(lines)


def _fish_value(value: str) -> str:
    if value == _FILES:
        return " -F"
    return (
        f" -f -a {_quoted('(__penstock_queues)' if value == _QUEUES else value)}"
        if value
        else " -f"
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS: Final = {"bash": _bash, "fish": _fish, "zsh": _zsh}
