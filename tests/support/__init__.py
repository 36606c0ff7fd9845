"""What the tests share: cases, kits, jobs, emulated machines."""
