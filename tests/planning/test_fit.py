import shutil
from collections import namedtuple

from moe_rl.config.load import load_config
from moe_rl.planning.fit import fit_problems


def test_a_full_disk(plan_of, config_file, monkeypatch):
    usage = namedtuple("usage", "total used free")
    assert fit_problems(load_config(config_file), plan_of()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    (message,) = fit_problems(load_config(config_file), plan_of())
    assert "free disk" in message and "got 1 bytes" in message
