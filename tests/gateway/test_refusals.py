"""Tests what the gateway refuses without asking any model, and that its messages say which field, and no key."""

import asyncio
import json

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from moe_rl.gateway import openai_dialect
from moe_rl.gateway.asking import BadRequest
from moe_rl.gateway.fields import checked
from moe_rl.gateway.web import _OpenBody, _unknown


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 10**30},
        {"tokens": 0},
        {"turns": -1},
        {"turns": 2**31},
        {"seconds": -3},
        {"seconds": 0},
        {"seconds": 1e300},
    ],
)
def test_a_limit_that_is_no_positive_number_of_its_size_is_refused(given):
    with pytest.raises(BadRequest) as told:
        checked(json.dumps(given).encode(), _OpenBody.__struct_fields__, {}, _OpenBody)
    assert told.value.field == next(iter(given)) and told.value.status == 400


def test_the_message_of_an_error_names_the_field():
    error = openai_dialect.error_body(BadRequest("this value is not served: 1", "n"))["error"]
    assert (error["message"], error["param"]) == ("n: this value is not served: 1", "n")


@pytest.mark.parametrize("path", ["/s/secret/v2/none", "//s//secret"])
def test_an_unknown_route_does_not_repeat_the_key(path):
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "server": ("h", 1)}
    request = Request(scope | {"scheme": "http", "root_path": ""})
    answer = asyncio.run(_unknown(request, HTTPException(404)))
    assert answer.status_code == 404 and b"no such route" in answer.body and b"secret" not in answer.body
