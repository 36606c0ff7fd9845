"""Shared memory of the ranks of a node: symmetric arrays, slots, barriers, and kernels in it.

============  ==============================================================================
calls         in_place: which array must be symmetric; host: what executors are made from
kernels       kernel (phases), fold (combine), barrier, conditional (skippable actions)
memory        heap: symmetric arrays, the staging slots and the words of the barriers
run           steps: a kernel as steps of compiled code
digest        four sums over an array's words, by which ranks compare values
C code        compiled (ctypes bindings), compiled.c, digest.c, steps.c, module.c
============  ==============================================================================

The engine has the executors, which bind schedules to this memory.
"""
