// Heads of 80 elements: see flash.cuh.
FLASH(80, 2)
