"""Memory on an accelerator: what an array there is, and what its device can do.

Nothing of CUDA is imported before an array of it is met: see :func:`~mpidist.device.find.device`.
"""
