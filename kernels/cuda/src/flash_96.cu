// Heads of 96 elements: see flash.cuh.
FLASH(96, 2)
