"""Small MSCCL files for tests."""

from pathlib import Path

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GOLDEN = (_EXAMPLES / "pair.xml").read_text(encoding="utf-8")
"""An allreduce of two GPUs, as a tool writes it."""


def xml(coll, chunks, gpus, scratch=0, sizes=None, **algo):
    """Return the text of a file.

    `gpus` has the thread blocks of each GPU: (send, recv, channel, steps).  A step is a text:
    ``"rrc i0 o0"``, then what differs from the defaults: ``"n2"`` for 2 chunks, ``"after1.0"`` for
    step 0 of thread block 1, ``"told"`` if others wait for it.  `sizes` are those of "i" and "o".
    """
    i, o = sizes or (chunks, chunks)
    known = {"name": "small", "proto": "Simple", "nchannels": 4, "nchunksperloop": chunks}
    known |= {"ngpus": len(gpus), "coll": coll, "inplace": 0, "outofplace": 1} | algo
    lines = ["<algo " + " ".join(f'{key}="{value}"' for key, value in known.items()) + ">"]
    for rank, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{rank}" i_chunks="{i}" o_chunks="{o}" s_chunks="{scratch}">')
        for number, (send, recv, channel, steps) in enumerate(blocks):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">')
            lines += [_step(s, words.split()) for s, words in enumerate(steps)]
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def _step(s, words):
    kind, places = words[0], [w for w in words[1:] if w[0] in "ios"]
    (source, target) = (places * 2)[:2] if places else ("i0", "o0")
    count = next((w[1:] for w in words[1:] if w[0] == "n"), 0 if kind == "nop" else 1)
    after = next((w[5:].split(".") for w in words if w.startswith("after")), (-1, -1))
    return (
        f'<step s="{s}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}" '
        f'dstbuf="{target[0]}" dstoff="{target[1:]}" cnt="{count}" depid="{after[0]}" '
        f'deps="{after[1]}" hasdep="{int("told" in words)}"/>'
    )


def all_pairs(size, inplace=False):
    """Return an allreduce in two hops: one thread block combines what the others have received."""
    out = "i" if inplace else "o"
    gpus = []
    for rank in range(size):
        peers = [peer for peer in range(size) if peer != rank]
        steps = [] if inplace else [f"cpy i{rank} o{rank}"]
        steps += [f"nop after{k + 1}.1" for k in range(1, len(peers))]
        steps += [f"re s{k} {out}{rank}" + " after1.1" * (k == 0) for k in range(len(peers))]
        steps[-1] += " told"
        blocks = [(-1, -1, 0, steps)]
        for k, peer in enumerate(peers):
            last = f"after0.{len(steps) - 1}"
            each = [f"s i{peer}", f"r s{k} told", f"s {out}{rank} {last}", f"r {out}{peer}"]
            blocks.append((peer, peer, 0, each))
        gpus.append(blocks)
    flags = {"inplace": int(inplace), "outofplace": int(not inplace)}
    return xml("allreduce", size, gpus, scratch=size - 1, **flags)


def one_block(size, step):
    """Return GPUs of one thread block each in a ring: `step` gives the steps of a rank."""
    return [[((r + 1) % size, (r - 1) % size, 0, step(r))] for r in range(size)]
