// Heads of 128 elements, which leave no room for a second stage of queries beside
// another block: see flash.cuh.
FLASH(128, 1)
