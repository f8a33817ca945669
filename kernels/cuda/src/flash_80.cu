// Heads of 80 elements, two blocks on a multiprocessor: see flash.cuh.
FLASH(80, 2, 2)
