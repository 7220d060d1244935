"""Tests the folder of checkpoints: which ones are complete, how one is published, which ones are put aside."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.errors import CheckpointError
from tests.support.refusals import refused


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def add(folder, *steps, best=None):
    for step in steps:
        hidden = checkpoints.begin(folder, step)
        (hidden / "state.json").write_text(str(step))
        checkpoints.publish(hidden, step, keep=2, best=best)


def test_a_folder_under_its_name_is_complete_and_the_newest_ones_stay(tmp_path):
    assert checkpoints.complete(tmp_path / "absent") == []
    add(tmp_path, 2, 4, 10)
    assert names(tmp_path) == ["step-000004", "step-000010"]
    checkpoints.begin(tmp_path, 12)
    assert [step for step, _ in checkpoints.complete(tmp_path)] == [4, 10]
    assert checkpoints.find(tmp_path).name == "step-000010" and checkpoints.find(tmp_path, 4).name == "step-000004"
    for step in (12, 14):
        checkpoints.publish(checkpoints.begin(tmp_path, step), step, keep=None)
    assert [step for step, _ in checkpoints.complete(tmp_path)] == [4, 10, 12, 14]


def test_the_new_one_is_on_disk_under_its_name_before_an_old_one_goes(tmp_path, monkeypatch):
    folder, done = tmp_path / "checkpoints", []

    def seen(function, what):
        def call(path, *arguments, **options):
            done.append((what, path.name, *(other.name for other in arguments)))
            return function(path, *arguments, **options)

        return call

    monkeypatch.setattr(checkpoints, "sync", seen(checkpoints.sync, "sync"))
    monkeypatch.setattr(Path, "rename", seen(Path.rename, "rename"))
    monkeypatch.setattr(shutil, "rmtree", seen(shutil.rmtree, "remove"))
    checkpoints.publish(checkpoints.begin(folder, 2), 2, keep=1)
    checkpoints.publish(checkpoints.begin(folder, 4), 4, keep=1)
    first = [("sync", ".step-000002.tmp"), ("rename", ".step-000002.tmp", "step-000002"), ("sync", "checkpoints")]
    second = [("sync", ".step-000004.tmp"), ("rename", ".step-000004.tmp", "step-000004"), ("sync", "checkpoints")]
    old = [("rename", "step-000002", ".step-000002.tmp"), ("remove", ".step-000002.tmp")]
    # The first checkpoint also creates the folder of all checkpoints.
    assert done == [("sync", tmp_path.name), *first, *second, *old]
    done.clear()
    checkpoints.abandon_newer(folder, 3)
    assert done[-2:] == [("rename", "step-000004", "step-000004.abandoned"), ("sync", "checkpoints")]


def test_what_a_dead_process_left_goes_with_the_next(tmp_path):
    (checkpoints.begin(tmp_path, 3) / "half").write_text("x")
    hidden = checkpoints.begin(tmp_path, 5)
    assert names(tmp_path) == [hidden.name] and not list(hidden.iterdir())


def test_an_old_one_of_which_a_file_is_open_stays_until_the_next_start(tmp_path, monkeypatch):
    """NFS renames such a file instead of removing it, so its folder is not empty."""
    add(tmp_path, 2, 4)
    remove = os.rmdir

    def in_use(path, **options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(os, "rmdir", in_use)
    add(tmp_path, 6)
    assert names(tmp_path) == [".step-000002.tmp", "step-000004", "step-000006"]
    monkeypatch.setattr(os, "rmdir", remove)
    checkpoints.sweep(tmp_path)
    assert names(tmp_path) == ["step-000004", "step-000006"]
    monkeypatch.setattr(shutil.os, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no")))
    with pytest.raises(PermissionError):
        add(tmp_path, 8)


def test_what_is_not_there_is_told_with_what_is(tmp_path):
    with refused(CheckpointError, "--step 0", folder=tmp_path, got="none"):
        checkpoints.find(tmp_path)
    add(tmp_path, 4, 6)
    with refused(CheckpointError, folder=tmp_path, got=("4, 6",), expected=("step-000005",)):
        checkpoints.find(tmp_path, 5)
    told = checkpoints.to_resume_instead(tmp_path / "step-000006")
    assert f"--resume {tmp_path.parent} --step N; N may be 4" in told


def test_newer_ones_are_put_aside_not_removed(tmp_path):
    add(tmp_path, 4, 6)
    (aside,) = checkpoints.abandon_newer(tmp_path, 4)
    assert (aside / "state.json").read_text() == "6" and checkpoints.find(tmp_path).name == "step-000004"
    add(tmp_path, 6)
    assert names(tmp_path) == ["step-000004", "step-000006", "step-000006.abandoned"]


def test_the_best_one_stays_and_a_link_names_it(tmp_path):
    add(tmp_path, 2, 4, best=2)
    add(tmp_path, 6, 8, 10, best=4)
    assert names(tmp_path) == ["best", "step-000004", "step-000008", "step-000010"]
    assert checkpoints.find(tmp_path, "best") == tmp_path / "step-000004" == (tmp_path / "best").resolve()
    assert [step for step, _ in checkpoints.complete(tmp_path)] == [4, 8, 10]
    add(tmp_path, 12, best=12)
    assert names(tmp_path) == ["best", "step-000010", "step-000012"]
    assert checkpoints.step_of(checkpoints.find(tmp_path, "best")) == 12
    add(tmp_path, 14, best=0)  # none is better than the policy that the run began with
    with refused(CheckpointError, folder=tmp_path, got=("best",)):
        checkpoints.find(tmp_path, "best")
    assert names(tmp_path) == ["step-000012", "step-000014"]


def test_a_copy_that_followed_the_link_has_a_best_checkpoint_again(tmp_path):
    """scp -r and object stores copy what a link leads to."""
    add(tmp_path, 2, 4, best=2)
    (tmp_path / "best").unlink()
    shutil.copytree(tmp_path / "step-000002", tmp_path / "best")
    with refused(CheckpointError, folder=tmp_path, got=("best",)):
        checkpoints.find(tmp_path, "best")
    checkpoints.name_best(tmp_path, 2)
    assert checkpoints.find(tmp_path, "best").resolve() == tmp_path / "step-000002"
    (tmp_path / "best").unlink()
    shutil.copytree(tmp_path / "step-000002", tmp_path / "best")
    checkpoints.name_best(tmp_path, None)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def test_a_kill_leaves_the_link_at_the_old_best_one_which_is_still_there(tmp_path, monkeypatch):
    add(tmp_path, 2, 4, 6, best=2)

    def killed(place, link):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", killed)
        add(tmp_path, 8, best=8)
    assert checkpoints.find(tmp_path, "best").name == "step-000002" and checkpoints.find(tmp_path).name == "step-000008"
    checkpoints.name_best(tmp_path, 8)
    assert checkpoints.find(tmp_path, "best").name == "step-000008"


def test_a_checkpoint_waits_for_the_part_of_every_rank(tmp_path):
    hidden = checkpoints.begin(tmp_path / "checkpoints", 3)
    assert checkpoints.handed_in(hidden, 2) == []
    checkpoints.hand_in(hidden, 1, b"of rank 1")
    assert checkpoints.handed_in(hidden, 2) == []
    checkpoints.hand_in(hidden, 0, b"of rank 0")
    assert [part.read_bytes() for part in checkpoints.handed_in(hidden, 2)] == [b"of rank 0", b"of rank 1"]
