"""Numbers written briefly."""

from __future__ import annotations


def spans(numbers: tuple[int, ...]) -> str:
    """Write numbers briefly: ``1-4, 7``; ``2, 4, … 32`` where every other one is missing."""
    parts: list[list[int]] = []
    step = numbers[1] - numbers[0] if len(numbers) > 3 else 1
    if step > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
