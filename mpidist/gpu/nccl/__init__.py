"""NCCL: the library's collectives, schedules over it, and the watch for hangs."""
