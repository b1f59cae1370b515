"""All bytes of a checkpoint read once, in chunks, by as many threads as there are cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
import torch

from vtensors.errors import CheckpointError
from vtensors.tensors import DTYPE_BITS
from vtensors.verification.findings import Finding, finding, finding_of
from vtensors.verification.shard_bytes import ShardBytes
from vtensors_plugins.verification.kinds import Subject
from vtensors_plugins.verification.tallies import Tally, tally_chunk

# Half of a usual second-level cache per core: what was read is still there when it is looked at.
CHUNK_BYTES = 1 << 20
MOST_THREADS = 8


def _nothing(count: int) -> None:
    """Progress that nobody watches."""


@attrs.define
class Scan:
    """tallies: tensor -> what its bytes gave. findings: tensors that could not be read. read: bytes."""

    tallies: dict[str, Tally] = attrs.field(factory=dict)
    findings: list[Finding] = attrs.field(factory=list)
    read: int = 0


@attrs.frozen(slots=True)
class _Chunk:
    subject: Subject
    begin: int
    end: int
    element: int


def thread_count() -> int:
    """Cores that this process may use, at most `MOST_THREADS`."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)


def scan(
    subjects: Sequence[Subject],
    source: ShardBytes,
    *,
    threads: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int], None] = _nothing,
) -> Scan:
    """Every tensor's tally. Memory: one chunk and its temporaries per thread, whatever the tensors' sizes.

    progress: told of the bytes read since, from any thread.
    """
    result = Scan()
    state = _State(chunks=_chunks(subjects, source, result, chunk_bytes), result=result)
    workers = [
        threading.Thread(target=_work, args=(state, source, chunk_bytes, progress), daemon=True)
        for _ in range(threads or thread_count())
    ]
    before = torch.get_num_threads()
    # The chunks are the parallelism: threads of torch's own below them would only contend.
    torch.set_num_threads(1)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        state.stop = True
        torch.set_num_threads(before)
    if state.failure is not None:
        raise state.failure
    return result


@attrs.define
class _State:
    chunks: Iterator[_Chunk]
    result: Scan
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    stop: bool = False
    failure: Exception | None = None

    def next_chunks(self, limit: int) -> list[_Chunk]:
        """Some chunks of together at most `limit` bytes, so that small tensors are not handed out singly."""
        taken: list[_Chunk] = []
        size = 0
        with self.lock:
            while size < limit and not self.stop and (chunk := next(self.chunks, None)) is not None:
                taken.append(chunk)
                size += max(4096, chunk.end - chunk.begin)
        return taken


def _chunks(
    subjects: Iterable[Subject], source: ShardBytes, result: Scan, chunk_bytes: int
) -> Iterator[_Chunk]:
    for subject in subjects:
        info = subject.info
        size = source.snapshot.shards[info.file].file_size
        if info.end > size:
            seen = f"it would end at byte {info.end} of a file of {size} bytes"
            result.findings.append(finding("unreadable-tensor", info.name, seen=seen))
            continue
        result.tallies[info.name] = Tally()
        # Chunks hold whole elements: the size is a power of two, and so is an element's.
        for begin in range(info.begin, info.end, chunk_bytes):
            element = (begin - info.begin) * 8 // DTYPE_BITS.get(info.dtype, 8)
            yield _Chunk(subject, begin, min(begin + chunk_bytes, info.end), element)


def _work(state: _State, source: ShardBytes, chunk_bytes: int, progress: Callable[[int], None]) -> None:
    memory = bytearray(chunk_bytes)
    view, data = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
    try:
        while chunks := state.next_chunks(chunk_bytes):
            for chunk in chunks:
                _check(chunk, state, source, view, data)
            progress(sum(chunk.end - chunk.begin for chunk in chunks))
    except Exception as failure:  # carried to the caller's thread
        state.failure = failure
        state.stop = True


def _check(chunk: _Chunk, state: _State, source: ShardBytes, view: memoryview, data: torch.Tensor) -> None:
    info, size = chunk.subject.info, chunk.end - chunk.begin
    whole = state.result.tallies[info.name]
    try:
        source.read_into(info.file, chunk.begin, view[:size])
    except CheckpointError as problem:
        with state.lock:
            if not any(f.tensor == info.name for f in state.result.findings):
                state.result.findings.append(finding_of("unreadable-tensor", problem, tensor=info.name))
        return
    tally = tally_chunk(
        chunk.subject.kind, info.dtype, data[:size], chunk.element, look_for_nonzero=not whole.nonzero
    )
    with state.lock:
        whole.merge(tally)
        state.result.read += size
