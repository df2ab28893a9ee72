"""The Python of docs/how-to/spark-queues.md is run unchanged, in the session of these tests."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

from penstock.backends.remote.daemon import stop_daemon
from tests.docs.test_documents import IN_SPARK, blocks


@pytest.mark.service("default-jre-headless")
@pytest.mark.timeout(480)
def test_the_python_code_of_the_page_runs_unchanged(spark, tmp_path, capsys):
    """Only its paths are replaced: Java was started in another directory than the reader's."""
    code = "\n".join(blocks(IN_SPARK, "python"))
    assert "make_session()" in code
    shuffles = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        exec(compile(code.replace("./", f"{tmp_path}/"), IN_SPARK, "exec"), {})
    finally:
        # The page's session is this one, with the settings that a new one would have had.
        spark.conf.set("spark.sql.shuffle.partitions", shuffles)
        stop_daemon(tmp_path / "shop")
    first, settled = capsys.readouterr().out.splitlines()
    assert first.startswith("b'bill for order ")
    assert settled == "Settled(deleted=0, lapsed=0)"
