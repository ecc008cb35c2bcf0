"""`lengthwise doctor`, and `lengthwise work` where tickets would be lost: exit codes, words, what is checked."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from tests.processes import CHECKOUT, Ended, lengthwise
from wire import Keys
from worker.doctor import model, processor
from worker.embedded import EmbeddedServer, embedded_server
from worker.finding import Finding, Level, exit_code

NOWHERE = "redis://:hunter2@127.0.0.1:1/0"
EVICTING = {"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with all the files of a model."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    save_file({"weight": np.zeros((8, 8), dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def evicting() -> Iterator[EmbeddedServer]:
    """A server that may delete any key."""
    with embedded_server(settings=EVICTING) as server:
        yield server


def findings(ended: Ended) -> dict[str, dict[str, Any]]:
    """What `--json` printed, by name."""
    return {finding["name"]: finding for finding in json.loads(ended.out)}


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([], 0),
        ([Level.OK, Level.INFO], 0),
        ([Level.OK, Level.WARN, Level.INFO], 1),
        ([Level.WARN, Level.LOSE, Level.OK], 2),
    ],
)
def test_exit_codes(levels: list[Level], code: int) -> None:
    """0: fine; 1: something to mend; 2: tickets would be lost. The worst finding counts, wherever it stands."""
    assert exit_code(Finding("any", level, "any") for level in levels) == code


def test_a_good_server_ends_with_0(model_folder: Path) -> None:
    """Where nothing is to be mended the command ends with 0, and --json prints a list of findings."""
    with embedded_server(appendonly=True) as server:
        ended = lengthwise("doctor", "--quick", "--json", "--model", str(model_folder), REDIS_URL=server.url)
    assert (ended.code, ended.err) == (0, "")
    found = findings(ended)
    assert {"version", "eviction", "persistence", "rights", "key types", "lease", "model", "processor"} <= set(found)
    assert {one["level"] for one in found.values()} <= {"ok", "info"}
    assert all(set(one) == {"name", "level", "found", "advice"} for one in found.values())


def test_something_to_mend_ends_with_1(redis_url: str, redis_client: redis.Redis, model_folder: Path) -> None:
    """What loses nothing but is to be mended ends the command with 1."""
    redis_client.set(Keys("tickets").results, "mine")
    ended = lengthwise("doctor", "--quick", "--json", "--model", str(model_folder), REDIS_URL=redis_url)
    assert ended.code == 1
    assert findings(ended)["key types"]["level"] == "warn"


def test_a_server_that_would_lose_tickets_ends_with_2(evicting: EmbeddedServer, model_folder: Path) -> None:
    """A person reads what is wrong and what to do; the password of the URL is not shown."""
    with redis.Redis.from_url(evicting.url) as client:
        client.config_set("requirepass", "hunter2")
        url = evicting.url.replace("://", "://:hunter2@")
        ended = lengthwise("doctor", "--quick", "--model", str(model_folder), REDIS_URL=url)
    assert ended.code == 2
    assert "lose  eviction" in ended.out
    assert "-> Set maxmemory-policy to noeviction" in ended.out
    assert "***@" in ended.out
    assert "hunter2" not in ended.out + ended.err


def test_a_missing_right_is_told_by_the_command(model_folder: Path) -> None:
    """Even the first thing a worker's connection does, naming itself, may be what its user lacks."""
    with embedded_server() as server, redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "ann", "on", ">hunter2", "~*", "+@all", "-client")
        url = server.url.replace("://", "://ann:hunter2@")
        ended = lengthwise("doctor", "--quick", "--json", "--model", str(model_folder), REDIS_URL=url)
    assert findings(ended)["rights"]["advice"] == "ACL SETUSER ann +client|setname"
    assert findings(ended)["version"]["level"] == "ok"


def test_no_redis_ends_with_69() -> None:
    """Without a Redis the message says where it looked, without the password."""
    ended = lengthwise("doctor", "--quick", REDIS_URL=NOWHERE)
    assert (ended.code, ended.out) == (69, "")
    assert "127.0.0.1:1" in ended.err
    assert "hunter2" not in ended.err


def test_the_lease_option_is_what_is_judged(redis_url: str, redis_client: redis.Redis, model_folder: Path) -> None:
    """--lease is in seconds, and the one that measured batches are held against."""
    redis_client.xadd(Keys("tickets").metrics, {"score_ms": "2000"})
    for lease_s, level in (("5.9", "warn"), ("6.1", "ok")):
        options = ["--quick", "--json", "--lease", lease_s, "--model", str(model_folder)]
        assert findings(lengthwise("doctor", *options, REDIS_URL=redis_url))["lease"]["level"] == level


def test_quick_loads_no_torch(redis_url: str, model_folder: Path) -> None:
    """--quick answers without torch in memory; without it, cores and arithmetic are told as well."""
    code = (
        "import sys; from worker.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    arguments = ["doctor", "--json", "--model", str(model_folder), "--url", redis_url]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, *arguments, *more], cwd=CHECKOUT, capture_output=True, text=True, check=True
        ).stdout
        for more in (["--quick"], [])
    ]
    names = [{finding["name"] for finding in json.loads(output.splitlines()[0])} for output in outputs]
    assert outputs[0].endswith("LOADED []\n")
    assert names[1] - names[0] == {"cores", "dtype"}


def test_a_worker_does_not_start_where_tickets_would_be_lost(evicting: EmbeddedServer) -> None:
    """`work` ends with 78 before it has looked at the model, and leaves no trace; --force goes on with a warning."""
    refused = lengthwise("work", "--model", "nosuch", REDIS_URL=evicting.url)
    assert (refused.code, refused.out) == (78, "")
    assert "eviction: allkeys-lru" in refused.err
    assert "Set maxmemory-policy to noeviction" in refused.err
    assert "--force" in refused.err
    assert "no model" not in refused.err
    with redis.Redis.from_url(evicting.url) as client:
        assert client.dbsize() == 0
    forced = lengthwise("work", "--force", "--model", "nosuch", REDIS_URL=evicting.url)
    assert (forced.code, "no model 'nosuch'" in forced.err) == (78, True)
    assert '"check": "eviction"' in forced.err


def test_a_whole_model(model_folder: Path) -> None:
    """A folder with all its files is fine."""
    assert model(str(model_folder)).level is Level.OK


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_lacks_a_file(model_folder: Path, name: str) -> None:
    """What a folder lacks is named."""
    (model_folder / name).unlink()
    found = model(str(model_folder))
    assert found.level is Level.WARN
    assert name.partition(".")[2] in found.found or "tokenizer" in found.found


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_model_cut_short(model_folder: Path, length: int) -> None:
    """Weights that end too early, by however little, are found without loading them."""
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    found = model(str(model_folder))
    assert found.level is Level.WARN
    assert str(file) in found.found


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    """A model that comes by name is to be pulled, a made-up one to be replaced; a hub's is fetched by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENGTHWISE_HOME", str(tmp_path))
        found = model("smollm2-135m")
    assert (found.level, found.advice) == (Level.WARN, "lengthwise model pull smollm2-135m")
    assert "expected one of smollm2-135m" in model("nosuch").found
    hub = model("nobody/has-this-model")
    assert (hub.level, "the first start fetches it" in hub.found) == (Level.INFO, True)


@pytest.mark.parametrize(
    ("line", "level", "says"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16", Level.OK, "amx_bf16, avx512_bf16"),
        ("Features\t: fp asimd bf16", Level.OK, "by bf16"),
        ("flags\t\t: fpu avx2", Level.INFO, "float32"),
        ("model name\t: bf16", Level.INFO, "float32"),
        (None, Level.INFO, "cannot see"),
    ],
)
def test_processors(tmp_path: Path, line: str | None, level: Level, says: str) -> None:
    """The processor's bfloat16 flags are read on x86 and ARM; none, or a system without the file, is no fault."""
    file = tmp_path / "cpuinfo"
    if line is not None:
        file.write_text(f"processor\t: 0\n{line}\n")
    found = processor(file)
    assert (found.level, says in found.found) == (level, True), found
