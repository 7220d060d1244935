import shutil
from collections import namedtuple

from moe_rl.config.load import load_config
from moe_rl.planning.fit import disk_problems


def test_a_full_disk(plan_of, config_file, monkeypatch):
    usage = namedtuple("usage", "total used free")
    assert list(disk_problems(load_config(config_file), plan_of())) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    (message,) = disk_problems(load_config(config_file), plan_of())
    assert "free disk" in message and "got 1 bytes" in message
