"""Names to folders: here, in the cache, or on the Hub, with the network replaced."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from headlong.checkpoint.find import DEFAULT, find


@pytest.fixture
def hub(monkeypatch):
    """Replace the download; calls are recorded, and the first answers are those given."""
    calls = []

    def install(*answers):
        left = list(answers)

        def snapshot_download(repo, **options):
            calls.append((repo, options))
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return install


def hub_error(kind, text="no"):
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


def test_folder_that_is_here(tmp_path):
    assert find(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["nothing-here", "./nothing/here", "a/b/c", "/no/where"])
def test_no_such_folder(refused, name):
    assert f"{name} is no folder here" in refused(find, name)


def test_no_name(refused):
    assert "empty" in refused(find, "")


def test_the_default_is_the_one_in_the_package(tmp_path, monkeypatch):
    """A folder of that name is reached by a path."""
    monkeypatch.setattr("headlong.checkpoint.find.embedded", lambda: tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT).mkdir()
    assert find(DEFAULT) == tmp_path / "package"
    for name in (f"./{DEFAULT}", Path(DEFAULT), tmp_path / DEFAULT):
        assert find(name).resolve() == tmp_path / DEFAULT


def test_file_instead_of_folder(tmp_path, refused):
    path = tmp_path / "model.safetensors"
    path.touch()
    assert "is a file" in refused(find, str(path))


def test_hub_name_and_revision(hub, tmp_path):
    calls = hub(str(tmp_path))
    assert find("org/name@v1.0") == tmp_path
    ((repo, options),) = calls
    assert (repo, options["revision"], options["local_files_only"]) == ("org/name", "v1.0", False)
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern or "gguf" in pattern for pattern in options["allow_patterns"])


def test_cache_serves_when_the_hub_is_out_of_reach(hub, tmp_path):
    calls = hub(ConnectionError("no route"), str(tmp_path))
    assert find("org/name") == tmp_path
    assert [options["local_files_only"] for _, options in calls] == [False, True]


def test_out_of_reach_and_not_cached(hub, refused):
    hub(ConnectionError("no route"), hub_error(errors.LocalEntryNotFoundError))
    sentence = refused(find, "org/name")
    assert "no folder here" in sentence
    assert "no route" in sentence
    assert "check the network" in sentence


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.RepositoryNotFoundError, "no such public model"),
        (errors.GatedRepoError, "accept the terms"),
        (errors.RevisionNotFoundError, "no revision v9"),
        (errors.HFValidationError, "no Hugging Face id"),
    ],
)
def test_hub_says_no(hub, refused, kind, said):
    hub(hub_error(kind))
    assert said in refused(find, "org/name@v9")
