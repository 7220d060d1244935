"""Serves the newest numbers of a process as Prometheus text at http://127.0.0.1:PORT/metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from moe_rl.errors import ConfigError

Read = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class _Collector:
    """Gives prometheus_client one gauge for each number, as it is now."""

    run: str
    read: Read

    def collect(self) -> Iterator[object]:
        from prometheus_client.core import GaugeMetricFamily

        for key, value in self.read().items():
            family = GaugeMetricFamily(f"moe_rl_{re.sub('[^a-zA-Z0-9_]', '_', key)}", key, labels=["run"])
            family.add_metric([self.run], value)
            yield family


@contextmanager
def serving(port: int | None, run: str, read: Read) -> Iterator[None]:
    """Serve numbers while the context is open; None: do nothing.

    Args:
        run: name of the run, the label of every number.
        read: returns {key: number}. A thread calls it for each request.

    Raises:
        ConfigError: something listens at the port already.
    """
    if port is None:
        yield
        return
    # imported here because it comes with vLLM, and only such runs need it
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(run, read))  # type: ignore[arg-type] # a collector needs no base class
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise ConfigError(
            "the metrics cannot be served",
            where={"key": "report.prometheus_port"},
            got=f"{port}: {error.strerror}",
            do="choose a free port, or set report.prometheus_port to null",
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
