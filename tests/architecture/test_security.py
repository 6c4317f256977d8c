"""What no file of ours may do: read a pickle, run a string, load a model's own code unasked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("actors", "learner", "replay", "services")
TREES = {
    file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
    for part in PARTS
    for file in (ROOT / part).rglob("*.py")
}
CALLS = [
    (name, node)
    for name, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
]
MODELS = ("AutoModel", "AutoModelForCausalLM")


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def keywords(node: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


def calls_of(*names: str) -> Iterator[tuple[str, ast.Call]]:
    yield from ((file, node) for file, node in CALLS if called(node) in names)


def test_no_file_reads_weights_or_arrays_in_a_way_that_may_unpickle():
    assert list(calls_of("torch.load", "joblib.load", "pandas.read_pickle", "pd.read_pickle")) == []
    arrays = list(calls_of("np.load", "numpy.load"))
    assert arrays
    assert [file for file, node in arrays if "allow_pickle" in keywords(node)] == []


def test_no_file_runs_a_string_or_a_shell():
    risky = ("eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "__import__")
    assert [(file, called(node)) for file, node in calls_of(*risky)] == []
    assert [file for file, node in CALLS if keywords(node).get("shell") == "True"] == []


def test_no_file_unpacks_an_archive_of_files():
    names = (".extractall", ".unpack_archive")
    assert [file for file, node in CALLS if called(node).endswith(names)] == []


def test_models_are_loaded_from_safetensors_and_without_their_code():
    loads = [(file, node) for file, node in CALLS if called(node).endswith(".from_pretrained")]
    assert len(loads) >= 6
    local = {"local"}  # of actors/search/encoder.py: names both, checked below
    for file, node in loads:
        given = keywords(node)
        trust = given.get("trust_remote_code")
        if trust is None:
            assert given.get(None) in local, f"{file}:{node.lineno} leaves trust_remote_code open"
        else:
            # The one exception passes on what policy.trust_remote_code says.
            assert trust == "False" or (file, trust) == ("learner/model.py", "trust_remote_code")
        if called(node).split(".")[0] in MODELS:
            assert given.get("use_safetensors") == "True", f"{file}:{node.lineno}"
    encoder = ast.unparse(TREES["actors/search/encoder.py"])
    assert "{'local_files_only': True, 'trust_remote_code': False}" in encoder


def test_the_engine_takes_safetensors_and_no_pickled_call():
    text = ast.unparse(TREES["actors/vllm_policy.py"])
    assert "'load_format': 'safetensors'" in text
    assert "'trust_remote_code': config.trust_remote_code" in text
    assert "os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '0'" in text


def test_ray_is_started_closed_or_joined():
    starts = {file for file, node in CALLS if called(node) == "ray.init"}
    assert starts == {"services/wiring.py", "services/experiments/ray_launcher.py"}
    closes = {file for file, node in CALLS if called(node) == "close_ray"}
    assert closes == {"services/wiring.py", "services/experiments/launchers.py"}
    proxies = [keywords(node) for _, node in calls_of("serve.start")]
    assert proxies == [{"proxy_location": "'Disabled'"}]  # no port of Serve's own
