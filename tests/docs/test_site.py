"""The site of the documentation: whole, without a link to nowhere, and readable at two widths."""

import http.server
import re
import threading
from functools import partial
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import penstock
from penstock.cli.parser import make_parser
from tests.browser import Browser
from tools import site

OVERFLOW = """
return [document.documentElement.scrollWidth - document.documentElement.clientWidth,
        document.querySelector("h1")?.textContent ?? ""]
"""


class Links(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.linked, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if found.get("id"):
            self.ids.add(found["id"])
        if tag == "a" and found.get("href"):
            self.linked.append(found["href"])
        if tag in ("script", "img", "iframe"):
            self.loaded.append(found.get("src") or "")
        if tag == "link" and found.get("rel") != "canonical":
            self.loaded.append(found.get("href") or "")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return site.build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(built):
    """Each page of the site by its URL path."""
    found = {}
    for path in built.rglob("*.html"):
        url = path.relative_to(built).as_posix().removesuffix("index.html")
        found[f"/{url}"] = Links(path.read_text())
    return found


def test_every_page_of_the_docs_is_on_the_site(pages):
    docs = site.ROOT / "docs"
    for path in docs.rglob("*.md"):
        # A README.md is the first page of its folder.
        url = path.relative_to(docs).as_posix().removesuffix(".md").removesuffix("/README")
        assert f"/{url}/" in pages or url == "index"
    assert {f"/{path.removesuffix('.md')}/" for path in site.GENERATED.values()} <= set(pages)


def test_every_link_within_the_site_reaches_a_page_and_its_heading(pages, built):
    broken = []
    for url, page in pages.items():
        for link in page.linked:
            target = urlsplit(urljoin(url, link))
            if target.scheme or target.netloc:
                continue
            if (found := pages.get(target.path)) is None:
                if not (built / unquote(target.path).strip("/")).is_file():
                    broken.append((url, link))
            elif target.fragment and unquote(target.fragment) not in found.ids:
                broken.append((url, link))
    assert broken == []


def test_a_page_loads_nothing_from_another_host(pages):
    loaded = {link for page in pages.values() for link in page.loaded}
    assert [link for link in loaded if urlsplit(link).netloc] == []
    assert any(link.endswith("site.css") for link in loaded)


def test_a_page_that_the_index_does_not_name_ends_the_build(built, tmp_path):
    docs = built.parent / "docs"
    index = (docs / "index.md").read_text().replace("(how-to/tasks.md)", "()")
    with pytest.raises(SystemExit, match=r"does not link to how-to/tasks\.md"):
        site.navigation(docs, index)


def test_the_reference_has_every_command_every_public_name_and_every_store(built):
    commands = (built / "reference" / "commands" / "index.html").read_text()
    for name, parser in site.subparsers_of(make_parser()):
        assert f"penstock {name}</code>" in commands
        for action, _ in site.subparsers_of(parser):
            assert f"penstock {name} {action}</code>" in commands
    library = Links((built / "reference" / "library" / "index.html").read_text())
    errors = Links((built / "reference" / "errors" / "index.html").read_text())
    names = set(penstock.__all__)
    assert names <= {each.rpartition(".")[2] for each in library.ids | errors.ids}
    stores = (built / "reference" / "stores" / "index.html").read_text()
    for lacks in site.LACKS_OF_STORES.values():
        for behaviour in lacks:
            assert f"<td>{behaviour}</td>" in stores


def test_llms_txt_lists_the_pages_of_the_index(built):
    text = (built / "llms.txt").read_text()
    assert text.startswith("# Penstock\n\n> Penstock is a message queue")
    index = (built.parent / "docs" / "index.md").read_text()
    listed = re.findall(r"\]\((.+?)\)", text)
    assert listed == [path for _, path, _ in site.LINK.findall(index)]


@pytest.mark.timeout(300)
@pytest.mark.service("chromium")
@pytest.mark.service("chromium-driver")
def test_no_page_is_wider_than_a_desktop_or_a_phone(pages, built, tmp_path):
    class QuietHandler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(QuietHandler, directory=built)
    )
    threading.Thread(target=server.serve_forever).start()
    wide = []
    try:
        for size in ((1280, 900), (390, 844)):
            with Browser(tmp_path / str(size[0]), *size) as browser:
                browser.resize(*size)
                for url in pages:
                    browser.visit(f"http://127.0.0.1:{server.server_port}{url}")
                    surplus, title = browser.run(OVERFLOW)
                    assert title
                    if surplus > 0:
                        wide.append((url, size[0], surplus))
                assert browser.complaints() == []
    finally:
        server.shutdown()
        server.server_close()
    assert wide == []
