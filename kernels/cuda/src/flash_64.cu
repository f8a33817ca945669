// Heads of 64 elements, three blocks on a multiprocessor: see flash.cuh.
FLASH(64, 2, 3)
