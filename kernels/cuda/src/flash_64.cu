// Heads of 64 elements: see flash.cuh.
FLASH(64, 2)
