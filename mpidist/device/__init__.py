"""Arrays in the memory of an accelerator, and the operations of its device.

CUDA is imported only when the first array on a GPU is passed: see
:func:`~mpidist.device.find.find_device`.
"""
