"""Values on their way to another process: bits, shapes and types survive; no array is pickled."""

import pickle
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.runtime import serialization
from jaxrl.runtime.serialization import pack, unpack
from jaxrl.sharding.reshard import Shards, box_of, reshard
from jaxrl.types import Completion, Prompt, TokenIds, Turn


def mesh(n, start=0):
    return Mesh(np.array(jax.devices()[start : start + n]), ("x",))


def rows(n, start=0):
    return NamedSharding(mesh(n, start), PartitionSpec("x"))


def everywhere(n):
    return NamedSharding(mesh(n), PartitionSpec())


@dataclass(frozen=True)
class Inner:
    weights: dict[str, Any]
    name: str


@dataclass(frozen=True)
class Outer:
    version: int
    inner: Inner
    parts: list[Any]
    none: None = None


def bits(x):
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def test_nested_values_arrive_with_the_same_bits():
    key = jax.random.key(0)
    w = jax.random.normal(key, (8, 3), jnp.float32)
    # Every bit pattern of bfloat16, NaNs with their payload too, which no arithmetic would keep.
    all_bf16 = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    value = Outer(
        version=3,
        inner=Inner({"w": jax.device_put(w, rows(4)), "b": jax.device_put(all_bf16, rows(2))}, "x"),
        parts=[
            jnp.int32(7),  # a scalar on a device
            jnp.zeros((0, 5)),
            np.arange(6).reshape(2, 3),
            all_bf16[:5],
            np.float32(1.5),
            (True, "text"),
        ],
    )
    got = unpack([pickle.loads(pickle.dumps(pack(value)))])
    assert isinstance(got, Outer) and (got.version, got.inner.name, got.none) == (3, "x", None)
    assert isinstance(got.inner.weights["w"], Shards)
    assert bits(got.inner.weights["w"]) == bits(w)
    assert bits(got.inner.weights["b"]) == bits(all_bf16)
    scalar, empty, integers, brain, number, plain = got.parts
    assert scalar.shape == () and bits(reshard(scalar, everywhere(2))) == bits(np.int32(7))
    assert empty.shape == (0, 5) and np.asarray(empty).dtype == np.float32
    assert bits(integers) == bits(np.arange(6).reshape(2, 3))
    assert bits(brain) == bits(all_bf16[:5])
    assert (number, plain) == (1.5, (True, "text"))


def test_arrays_are_outside_the_pickle():
    mark = np.frombuffer(b"a mark that is easy to find in bytes", np.uint8)
    value = {"device": jax.device_put(mark), "host": mark.copy(), "text": "a mark of a string"}
    packed = pack(value)
    assert mark.tobytes() not in packed.pickled and b"a mark of a string" in packed.pickled
    assert [[x.nbytes for x in bucket] for bucket in packed.buckets] == [[mark.nbytes]]
    assert [b.nbytes for b in packed.buffers] == [mark.nbytes]


def test_the_copy_outlives_the_device_buffer():
    x = jax.device_put(np.arange(8, dtype=np.float32), rows(2))
    packed = pack(x)
    x.delete()
    np.testing.assert_array_equal(np.asarray(unpack([packed])), np.arange(8))


class Shelf:
    """Keeps buckets as an object store does, and counts who fetches what."""

    def __init__(self):
        self.buckets, self.fetched = [], []

    def store(self, bucket):
        self.buckets.append([np.array(values) for values in bucket])
        return len(self.buckets) - 1

    def fetch(self, place):
        self.fetched.append(place)
        return self.buckets[place]

    def nbytes(self, packed):
        return sum(values.nbytes for place in packed.buckets for values in self.buckets[place])


def test_pieces_travel_in_buckets_and_only_the_needed_ones_are_fetched(monkeypatch):
    monkeypatch.setattr(serialization, "BUCKET_BYTES", 100)
    shelf = Shelf()
    values = [np.full((10,), i, np.float32) for i in range(5)]  # 40 bytes each
    packed = pack([jax.device_put(v) for v in values], shelf.store)
    # Two of 40 bytes fit into 100: buckets of 2, 2, 1.
    assert [len(bucket) for bucket in shelf.buckets] == [2, 2, 1]
    assert packed.buckets == (0, 1, 2) and shelf.nbytes(packed) == 200
    got = unpack([packed], shelf.fetch)
    assert shelf.fetched == []
    np.testing.assert_array_equal(np.asarray(got[3]), values[3])
    assert shelf.fetched == [1]
    # One that is larger than a bucket has one of its own.
    large = pack([jnp.zeros(50), jnp.zeros(2)], shelf.store)
    assert [len(bucket) for bucket in shelf.buckets[3:]] == [1, 1] and shelf.nbytes(large) == 208


def test_copies_to_the_host_run_ahead_of_the_buckets(monkeypatch):
    """While a bucket is stored, those of the next one have begun, and of no more than two."""
    monkeypatch.setattr(serialization, "BUCKET_BYTES", 100)
    begun, read, stored = [], [], []

    class Piece:
        nbytes = 40

        def __init__(self, number):
            self.number = number

        def copy_to_host_async(self):
            begun.append(self.number)

        def __array__(self, dtype=None, copy=None):
            assert self.number in begun
            read.append(self.number)
            return np.full(10, self.number, np.float32)

    def store(bucket):
        stored.append([int(values[0]) for values in bucket])
        if len(read) < 10:
            assert begun[: len(read) + 2] == [*range(min(len(read) + 2, 10))]
        assert len(begun) <= len(read) + 6  # 200 bytes, and one more
        return len(stored)

    numbers = iter(range(10))
    monkeypatch.setattr(
        serialization, "local_pieces", lambda x: [(((0, 10),), Piece(next(numbers)))]
    )
    pack([jnp.zeros(10) for _ in range(10)], store)
    assert begun == read == [*range(10)]
    assert stored == [[i, i + 1] for i in range(0, 10, 2)]


def ranks_of(monkeypatch, value, devices_of_rank, shelf):
    """What each process of a pool would pack: those boxes whose first copy it holds."""
    packed = []
    for devices in devices_of_rank:

        def held(x, mine=frozenset(devices)):
            return [
                (box_of(shard.index, x.shape), shard.data)
                for shard in x.addressable_shards
                if shard.replica_id == 0 and shard.device.id in mine
            ]

        monkeypatch.setattr(serialization, "local_pieces", held)
        packed.append(pack(value, shelf.store))
    return packed


@pytest.mark.parametrize("receivers", [1, 2, 4])
def test_the_pieces_of_several_processes_make_one_array(monkeypatch, receivers):
    shelf = Shelf()
    whole = np.random.default_rng(0).standard_normal((8, 4)).astype(jnp.bfloat16)
    sent = {
        "sharded": jax.device_put(whole, rows(4)),
        "replicated": jax.device_put(whole, everywhere(4)),
    }
    packed = ranks_of(monkeypatch, sent, [{0, 1}, {2, 3}], shelf)
    # Each half of the sharded one is sent once, the replicated one by the first process only.
    sizes = [shelf.nbytes(p) for p in packed]
    assert sizes == [whole.nbytes // 2 + whole.nbytes, whole.nbytes // 2]
    first, second = packed
    second = serialization.Parcel(
        b"", (), second.arrays, second.buckets
    )  # as the others send theirs
    got = unpack([first, second], shelf.fetch)
    placed = reshard(got, rows(receivers, start=4))
    for name in sent:
        assert placed[name].sharding == rows(receivers, start=4)
        assert bits(placed[name]) == bits(whole)


def test_processes_that_disagree_are_not_joined():
    one, other = pack([jnp.zeros(4)]), pack([jnp.zeros(5)])
    with pytest.raises(AssertionError, match="disagree"):
        unpack([one, other])


def test_a_missing_piece_is_told(monkeypatch):
    shelf = Shelf()
    x = jax.device_put(np.arange(8.0, dtype=np.float32), rows(2))
    halves = ranks_of(monkeypatch, x, [{0}, {1}], shelf)
    with pytest.raises(RuntimeError, match="do not cover"):
        np.asarray(unpack(halves[:1], shelf.fetch))


def test_tokens_travel_as_arrays_and_are_what_they_were():
    """Of prompts and completions, from tuples or sampled; they still equal tuples, hash and index
    as these do, and the pickle holds none of them."""
    rng = np.random.default_rng(0)
    ids = [tuple(rng.integers(0, 1 << 31, n).tolist()) for n in (0, 1, 2, 5000)]
    unknown = np.zeros(5000, np.float32)
    prompt = Prompt(3, ids[3], "text", ids[1], teacher_tokens=ids[2], sampling_tokens=ids[0])
    completions = [
        Completion(kind(tokens), unknown, unknown, "stop", "words", (Turn("assistant", 5000, ""),))
        for kind in (tuple, TokenIds)
        for tokens in ids
    ]
    parcel = pack([prompt, completions])
    assert len(parcel.pickled) < 6000  # of 15,000 tokens
    got, rows = unpack([parcel])
    names = ("tokens", "completion", "teacher_tokens", "sampling_tokens")
    moved = [(getattr(prompt, name), getattr(got, name)) for name in names]
    moved += [(a.tokens, b.tokens) for a, b in zip(completions, rows, strict=True)]
    for before, after in moved:
        assert type(after) is TokenIds and after.array.dtype == np.int32
        plain = tuple(before)
        assert after == before and before == after and after == plain and plain == after
        assert after != (*plain, 1) and hash(after) == hash(plain) and list(after) == list(plain)
        assert after + (1,) == (*plain, 1) and (1,) + after == (1, *plain) == (*(1,), *after)
        with pytest.raises(ValueError, match="read-only"):
            after.array[:] = 0
        for part in (slice(None, -1), slice(1, 3), slice(None, None, 2)):
            assert after[part] == plain[part]
        np.testing.assert_array_equal(np.asarray(after), np.array(plain, np.int32))
        assert not plain or (type(after[-1]) is int and after[-1] == plain[-1])
    assert replace(got, text="other", tokens=ids[3]) == replace(prompt, text="other")
    assert rows[-1].turns == completions[-1].turns and rows[-1].sampled.shape == (5000,)
