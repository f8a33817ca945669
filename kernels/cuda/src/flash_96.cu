// Heads of 96 elements: as those of 128.
FLASH(96, 1, 2)
