import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moe_rl.errors import describe
from moe_rl.messages import Channel, Message, decode, decoder, encode
from tests.support.refusals import refused


@dataclass(frozen=True, slots=True)
class Note:
    where: Path
    values: np.ndarray


class Ask(Message):
    note: Note


class Told(Message):
    text: str


class Done(Message):
    pass


CALLS, REPLIES = decoder(Ask), decoder(Told | Done)


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    with left, right:
        for end in (left, right):
            end.settimeout(0.2)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # some hosts have 4 MiB
        yield left, right


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(8, "little") + payload


def test_values_pass():
    note = Note(Path("/a"), np.array([1.5, np.nan, -0.0], np.float32))
    back = decode(encode(note), Note)
    assert back.where == note.where and back.values.tobytes() == note.values.tobytes()
    assert back.values.dtype == np.float32


def test_of_a_problem_only_the_text_is_sent():
    problem = describe("it is wrong", where={"key": "a.b"}, got=1)
    assert decode(encode([problem]), list[str]) == ["a.b: it is wrong: got 1"]


@pytest.mark.parametrize("value", [object(), np.zeros(2), np.zeros((1, 1), np.float32)])
def test_what_has_no_msgpack_is_named(value):
    with refused(TypeError, type(value).__name__):
        encode([value])


@pytest.mark.parametrize("payload", [encode(3), encode(["a", 1]), encode(["a"])[:-1], b"", b"\xc1"])
def test_another_type_is_refused(payload):
    with pytest.raises(ValueError):
        decode(payload, list[str])


def test_half_an_array_is_refused():
    with pytest.raises(ValueError):
        decode(encode(b"12345"), np.ndarray)


def test_messages_pass_both_ways(ends):
    trainer, engine = Channel(ends[0], REPLIES), Channel(ends[1], CALLS)
    trainer.send(Ask(Note(Path("b"), np.ones(3, np.float32))))
    assert engine.receive().note.values.tolist() == [1.0, 1.0, 1.0]
    engine.send(Told("one"))
    engine.send(Told("two\0\u20ac"))
    assert [trainer.receive(), trainer.receive()] == [Told("one"), Told("two\0\u20ac")]


def test_what_follows_a_message_stays_in_the_socket(ends):
    Channel(ends[0], REPLIES).send(Told("first"))
    ends[0].send(b"second")
    assert Channel(ends[1], REPLIES).receive() == Told("first")
    assert ends[1].recv(100) == b"second"


def test_a_message_that_comes_in_pieces_is_kept(ends):
    channel = Channel(ends[1], REPLIES)
    for byte in framed(encode(Told("slow"))):
        with pytest.raises(TimeoutError):
            ends[1].settimeout(0.001)
            channel.receive()
        ends[0].send(bytes([byte]))
    assert channel.receive() == Told("slow")


def test_a_message_that_the_other_end_does_not_take_is_kept(ends):
    for end in ends:
        end.setblocking(False)
    sender, receiver = Channel(ends[0], REPLIES), Channel(ends[1], REPLIES)
    texts = ["x" * 2_000_000, "y"]
    for text in texts:
        with pytest.raises(BlockingIOError):
            sender.send(Told(text))
    heard = []
    while len(heard) < 2:
        try:
            heard.append(receiver.receive().text)
        except BlockingIOError:
            assert sender._unsent
            try:
                sender.flush()
            except BlockingIOError:
                continue
    assert heard == texts and not sender._unsent


def test_an_end_that_does_not_read_is_waited_for_no_longer_than_the_timeout(ends):
    with pytest.raises(TimeoutError):
        Channel(ends[0], REPLIES).send(Told("x" * 2_000_000))


def test_a_message_that_cannot_be_encoded_sends_nothing(ends):
    channel = Channel(ends[0], REPLIES)
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        channel.send(Told("\ud800"))
    assert not channel._unsent
    channel.send(Told("next"))
    assert Channel(ends[1], REPLIES).receive() == Told("next")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"\xff" * 8, "a frame is too long: got 18446744073709551615 bytes, expected at most 100"),
        ((101).to_bytes(8, "little") + bytes(101), "a frame is too long: got 101 bytes"),
        (framed(b""), "truncated"),
        (framed(encode(Told("cut"))[:-1]), "truncated"),
        (framed(encode(Told("more")) + b"\0"), "trailing"),
        (framed(encode({"type": "Ask", "note": 1})), "Invalid value 'Ask'"),
        (framed(encode({"type": "Told", "text": 1})), "Expected `str`, got `int`"),
        (framed(encode({"type": "Told", "text": "a", "also": 1})), "unknown field `also`"),
        (framed(encode({"text": "a"})), "missing required field `type`"),
        (framed(encode("text")), "Expected `object`, got `str`"),
    ],
)
def test_what_is_no_message_is_named(ends, sent, message):
    ends[0].send(sent)
    with pytest.raises(ValueError, match=message):
        Channel(ends[1], REPLIES, longest=100).receive()


@pytest.mark.parametrize(
    ("sent", "message"), [(b"", "the other end closed$"), (framed(b"abc")[:-1], "got 10 bytes of a frame")]
)
def test_an_end_that_closed_is_named(ends, sent, message):
    ends[0].send(sent)
    ends[0].close()
    with pytest.raises(EOFError, match=message):
        Channel(ends[1], REPLIES).receive()


def test_an_end_that_is_gone_cannot_be_sent_to(ends):
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        Channel(ends[0], REPLIES).send(Told("anyone?"))


def test_messages_need_no_numpy():
    run = "import sys, moe_rl.messages; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", run], cwd=Path(__file__).parents[1], check=False).returncode == 0
