"""The texts of docs/how-to/ for other programs are valid, and `penstock serve` takes what they say.

Neither Docker nor a runner of GitHub is here: their files are read, and their servers started
without them.
"""

import ast
import re
import shlex
from pathlib import Path

import yaml

from penstock.elasticmq import read_elasticmq
from tests.docs.test_documents import FENCE
from tests.server.sqs.conftest import serve

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
CONTAINERS = HOW_TO / "containers-and-ci.md"


def texts(page, language):
    return [text for name, text in FENCE.findall(page.read_text()) if name == language]


def files():
    """Each YAML text of the page, by the name in its first line."""
    found = {}
    for text in texts(CONTAINERS, "yaml"):
        name = re.match(r"# (\S+)\n", text)
        assert name is not None
        # YAML of version 1.1 reads `on` as true.
        found[name[1]] = yaml.safe_load(text)
    return found


def assert_serves(arguments, tmp_path):
    """A server starts with these arguments, but for its port and directory."""
    (tmp_path / "ready.d").mkdir(exist_ok=True)
    has_store = any(word.startswith("--store") for word in arguments)
    more = [] if has_store else ["--data", str(tmp_path / "data")]
    with serve(*arguments, *more) as server:
        url = server.client().create_queue(QueueName="orders")["QueueUrl"]
        assert url.endswith("/000000000000/orders")
        assert server.stop() == 0


def test_the_compose_file_runs_a_server_that_its_other_service_finds(tmp_path):
    services = files()["compose.yaml"]["services"]
    assert_serves(services["sqs"]["command"], tmp_path)
    endpoint = services["shop"]["environment"]["AWS_ENDPOINT_URL_SQS"]
    assert endpoint == "http://sqs:9324"
    assert services["sqs"]["ports"] == ["127.0.0.1:9324:9324"]
    assert services["shop"]["depends_on"]["sqs"]["condition"] == "service_healthy"
    check = services["sqs"]["healthcheck"]["test"]
    assert check[0] == "CMD"
    ast.parse(check[3])


def test_the_modules_of_testcontainers_give_arguments_with_which_a_server_starts(tmp_path):
    (python,) = texts(CONTAINERS, "python3")
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(python).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert_serves(shlex.split(constants["COMMAND"]), tmp_path)
    (java,) = texts(CONTAINERS, "java")
    (command,) = re.findall(r"withCommand\((.*)\)", java)
    assert_serves(ast.literal_eval(f"[{command}]"), tmp_path)
    assert java.count("(") == java.count(")")


def test_the_action_starts_a_server_and_the_workflow_uses_it(tmp_path):
    action = files()[".github/actions/penstock/action.yml"]
    (step,) = action["runs"]["steps"]
    used = set(re.findall(r"inputs\.(\w+)", str(step["env"])))
    assert used == action["inputs"].keys()
    (command,) = re.findall(r"^penstock serve (.*?) >", step["run"], re.MULTILINE)
    assert_serves(command.split(), tmp_path)
    workflow = files()[".github/workflows/test.yml"]
    uses = [each.get("uses") for each in workflow["jobs"]["test"]["steps"]]
    assert "./.github/actions/penstock" in uses


def test_the_configuration_file_of_elasticmq_that_is_shown_is_read(tmp_path):
    (text,) = texts(HOW_TO / "coming-from-elasticmq.md", "hocon")
    settings = read_elasticmq(text, "elasticmq.conf")
    assert set(settings["queues"]) == {"queue1", "queue1-dead-letters", "events.fifo"}
    (tmp_path / "elasticmq.conf").write_text(text)
    assert_serves(["--config", str(tmp_path / "elasticmq.conf"), "--store", "memory:"], tmp_path)


def test_the_page_of_elasticmq_names_what_is_refused():
    page = (HOW_TO / "coming-from-elasticmq.md").read_text()
    for name in ("copyTo", "moveTo", "sqs-limits = relaxed", "context-path", "${…}", "+="):
        assert f"`{name}`" in page


def test_every_such_page_says_what_to_change_and_what_is_not_there():
    for name in ("localstack", "elasticmq", "moto", "aws-emulator"):
        page = (HOW_TO / f"coming-from-{name}.md").read_text()
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        assert headings[0] == "What to change"
        assert headings[-1] == "What is not there, and what was not checked"
        assert {"What differs", "What is better"} < set(headings)
