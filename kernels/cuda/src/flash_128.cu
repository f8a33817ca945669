// Heads of 128 elements, two blocks on a multiprocessor, which leave no room for a
// second stage of queries: see flash.cuh.
FLASH(128, 1, 2)
