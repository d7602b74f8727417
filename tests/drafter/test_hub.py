"""Pushing the drafter, against a stand-in of the Hub's HTTP interface in this process."""

import base64
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load

from tlt_trl.drafter import Drafter
from tlt_trl.drafter.checkpoint import DrafterSnapshot
from tlt_trl.drafter.hub import BackgroundPusher, acceptance_history, write_model_card


TOKEN = "hf_standin"


class HubHandler(BaseHTTPRequestHandler):
    """Repositories with the files of their branches; the calls of `create_repo` and `upload_folder`, no more."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        hub = self.server.hub
        hub.calls.append(self.path)
        if not hub.open.wait(timeout=30):
            return self.answer(503, {"error": "closed"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials in Authorization header"})
        if self.path == "/api/repos/create":
            request = json.loads(body)
            repo_id = f"{request.get('organization') or 'somebody'}/{request['name']}"
            hub.visibility.setdefault(repo_id, request.get("visibility"))
            hub.files.setdefault((repo_id, "main"), {})
            return self.answer(200, {"url": f"{hub.endpoint}/{repo_id}", "id": repo_id, "name": repo_id})
        _, _, _, owner, name, action, revision = self.path.split("?")[0].split("/")
        repo_id = f"{owner}/{name}"
        if action == "branch":
            hub.files.setdefault((repo_id, revision), {})
            return self.answer(200, {})
        if (repo_id, revision) not in hub.files:
            return self.answer(404, {"error": f"no {repo_id} at {revision}"})
        if action == "preupload":
            files = json.loads(body)["files"]
            return self.answer(
                200,
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]},
            )
        assert action == "commit"
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                hub.commits.append((repo_id, revision, line["value"]["summary"]))
            else:
                content = base64.b64decode(line["value"]["content"])
                hub.files[repo_id, revision][line["value"]["path"]] = content
        commit = {"commitUrl": f"{hub.endpoint}/{repo_id}/commit/0123", "commitOid": "0123", "pullRequestUrl": None}
        self.answer(200, commit)

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    gate = threading.Event()
    gate.set()
    server.hub = SimpleNamespace(endpoint=endpoint, files={}, visibility={}, commits=[], calls=[], open=gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    # The card's metadata is validated at a fixed address, by nobody's server here.
    monkeypatch.setattr(ModelCard, "validate", lambda *args, **kwargs: None)
    yield server.hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def drafter(make_drafter):
    return make_drafter(draft_token_ids=torch.arange(1, 128, 3))


HISTORY = [
    {"step": step, "acceptance_length": 1.0 + 0.1 * step, "position_1": 0.5, "position_2": 0.25} for step in range(30)
]
PROVENANCE = {"policy": "somebody/policy", "policy_steps": 29, "tokens_trained": 1234, "acceptance_length": 3.9}


class TestPushToHub:
    def test_the_repository_holds_what_engines_load(self, hub, drafter):
        commit = drafter.push_to_hub("somebody/tiny-drafter", private=True, token=TOKEN, provenance=PROVENANCE)
        assert commit.oid == "0123"
        files = hub.files["somebody/tiny-drafter", "main"]
        assert files.keys() == {"config.json", "model.safetensors", "provenance.json", "README.md"}
        assert hub.visibility["somebody/tiny-drafter"] == "private"
        assert json.loads(files["config.json"])["architectures"] == ["LlamaForCausalLMEagle3"]
        for name, tensor in drafter.vllm_weights():
            assert torch.equal(load(files["model.safetensors"])[name], tensor), name

    def test_branch(self, hub, drafter):
        drafter.push_to_hub("somebody/tiny-drafter", revision="try", token=TOKEN)
        assert not hub.files["somebody/tiny-drafter", "main"]
        assert "model.safetensors" in hub.files["somebody/tiny-drafter", "try"]

    def test_save_pretrained_pushes_too(self, hub, drafter, tmp_path):
        drafter.save_pretrained(tmp_path / "mine", push_to_hub=True, token=TOKEN)
        assert hub.files["somebody/mine", "main"].keys() == {"config.json", "model.safetensors", "provenance.json"}

    def test_an_explicit_push_raises(self, hub, drafter):
        with pytest.raises(Exception, match="401"):
            drafter.push_to_hub("somebody/tiny-drafter", token="hf_wrong")


class TestBackgroundPusher:
    def begin(self, pusher, drafter, message="step 1"):
        return pusher.push(DrafterSnapshot.of(drafter), PROVENANCE, HISTORY, message, "output/drafter")

    def test_pushes_with_a_card(self, hub, drafter):
        pusher = BackgroundPusher("somebody/d", token=TOKEN)
        assert self.begin(pusher, drafter)
        pusher.join()
        assert {"README.md", "acceptance.png", "model.safetensors"} <= hub.files["somebody/d", "main"].keys()
        assert hub.commits == [("somebody/d", "main", "step 1")]

    def test_the_drafter_is_that_of_the_moment(self, hub, drafter):
        hub.open.clear()
        weights = {name: tensor.clone() for name, tensor in drafter.vllm_weights()}
        pusher = BackgroundPusher("somebody/d", token=TOKEN)
        self.begin(pusher, drafter)
        for parameter in drafter.parameters():
            parameter.data.zero_()
        hub.open.set()
        pusher.join()
        pushed = load(hub.files["somebody/d", "main"]["model.safetensors"])
        assert all(torch.equal(pushed[name], tensor) for name, tensor in weights.items())

    @pytest.mark.parametrize(("always", "messages"), [(False, ["step 1"]), (True, ["step 1", "step 2"])])
    def test_one_at_a_time(self, hub, drafter, always, messages):
        hub.open.clear()
        pusher = BackgroundPusher("somebody/d", token=TOKEN, always=always)
        assert self.begin(pusher, drafter, "step 1")
        assert self.begin(pusher, drafter, "step 2") is always
        hub.open.set()
        pusher.join()
        assert [summary for _, _, summary in hub.commits] == messages

    def test_a_bad_token_is_reported_with_what_to_do(self, hub, drafter, caplog):
        pusher = BackgroundPusher("somebody/d", private=True, revision="v2", token="hf_wrong")
        with caplog.at_level(logging.ERROR):
            assert self.begin(pusher, drafter)
            pusher.join()
        assert "401" in caplog.text and "trainer.push_drafter_to_hub()" in caplog.text
        command = "hf upload somebody/d output/drafter . --exclude 'training/*' --private --revision v2`"
        assert command in caplog.text
        assert not hub.commits

    def test_no_network(self, hub, drafter, caplog, monkeypatch):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        pusher = BackgroundPusher("somebody/d", token=TOKEN)
        with caplog.at_level(logging.ERROR):
            assert self.begin(pusher, drafter)
            pusher.join()
        assert "was not pushed to somebody/d: ConnectError" in caplog.text
        # The next one is tried all the same.
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        assert self.begin(pusher, drafter, "step 2")
        pusher.join()
        assert [summary for _, _, summary in hub.commits] == ["step 2"]


class TestModelCard:
    def write(self, tmp_path, drafter, history=HISTORY, provenance=PROVENANCE):
        write_model_card(tmp_path, "somebody/d", drafter.config, provenance, history)
        return (tmp_path / "README.md").read_text()

    def test_says_what_it_is_and_how_to_serve_it(self, tmp_path, drafter):
        card = self.write(tmp_path, drafter)
        metadata = ModelCard(card).data
        assert metadata.base_model == "somebody/policy" and "eagle3" in metadata.tags
        assert '"model": "somebody/d", "num_speculative_tokens": 3}' in card
        assert "vllm serve somebody/policy --speculative-config \\\n" in card
        assert "--speculative-draft-model-path somebody/d \\\n" in card
        assert "| tokens the drafter was trained on | 1234 |" in card
        assert "| draft vocabulary | 43 of 128 tokens |" in card

    def test_table_is_short_and_ends_with_the_last_step(self, tmp_path, drafter):
        rows = [line for line in self.write(tmp_path, drafter).splitlines() if line.endswith("| 0.50 | 0.25 |")]
        assert len(rows) == 10
        assert rows[-1] == "| 29 | 3.900 | 0.50 | 0.25 |"
        assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")

    def test_without_matplotlib_there_is_the_table(self, tmp_path, drafter, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        card = self.write(tmp_path, drafter)
        assert "acceptance.png" not in card and "| 29 | 3.900 |" in card
        assert not (tmp_path / "acceptance.png").exists()

    def test_a_policy_in_a_folder_is_no_base_model(self, tmp_path, drafter):
        card = self.write(tmp_path, drafter, provenance={"policy": str(tmp_path)}, history=[])
        assert ModelCard(card).data.base_model is None
        assert f"`{tmp_path}`" in card


def test_history_is_read_from_the_log():
    log = [
        {"step": 1, "loss": 0.1, "tlt/acceptance_length": 1.5, "tlt/acceptance/position_1": 0.5},
        {"step": 1, "eval_loss": 0.1},
    ]
    assert acceptance_history(log) == [{"step": 1, "acceptance_length": 1.5, "position_1": 0.5}]


def test_from_pretrained_takes_a_folder(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), drafter.state_dict().values(), strict=True)
    )
