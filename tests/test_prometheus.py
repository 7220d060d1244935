"""Prometheus text of a run: every newest number, on loopback only, and a port in use is named."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_rl.config.load import load_config
from moe_rl.errors import ConfigError
from moe_rl.prometheus import serving
from tests.support.ports import free_port
from tests.support.refusals import refused


@pytest.fixture
def port():
    return free_port()


def scraped(port):
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return {one.name: [(s.labels, s.value) for s in one.samples] for one in text_string_to_metric_families(text)}


def test_the_newest_numbers_are_served(port):
    numbers = {"policy_kl/k3": 0.25, "step": 3}
    with serving(port, "run-1", lambda: numbers):
        assert scraped(port) == {
            "moe_rl_policy_kl_k3": [({"run": "run-1"}, 0.25)],
            "moe_rl_step": [({"run": "run-1"}, 3.0)],
        }
        numbers = {"step": 4}
        assert scraped(port) == {"moe_rl_step": [({"run": "run-1"}, 4.0)]}
        with refused(ConfigError, key="report.prometheus_port", got=(str(port), "in use")), serving(port, "b", dict):
            pass
    with pytest.raises(httpx.ConnectError):
        scraped(port)


def test_nothing_is_served_without_a_port():
    with serving(None, "run-1", lambda: 1 / 0):
        pass
    with refused(ConfigError, key="report.prometheus_port"):
        load_config("tiny_moe_cpu", ["report.prometheus_port=65535"])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_and_its_pool_are_scraped_while_they_work(port, tmp_path):
    """The last scrape of each is looked at."""
    from tests.end_to_end.conftest import BRIEF, Launch, config

    launch = Launch(
        tmp_path,
        *config(
            f"run.runs_dir={tmp_path}",
            *BRIEF,
            "pipeline.mode=async",
            "rollout.sleep_level=0",
            f"report.prometheus_port={port}",
        ),
    )
    seen = {}

    def both():
        for one in (port, port + 1):
            try:
                seen[one] = scraped(one) or seen.get(one)
            except httpx.TransportError:
                continue
        return bool(seen.get(port)) and bool(seen.get(port + 1))

    launch.until(both, 900)
    assert launch.wait() == 0, launch.text()[-3000:]
    assert any(name.startswith(("moe_rl_policy_kl", "moe_rl_eval")) for name in seen[port])
    assert set(seen[port + 1]) == {
        f"moe_rl_pool_groups_{state}" for state in ("waiting", "sampling", "judging", "ready")
    }
