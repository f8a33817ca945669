// Heads of 64 elements, registers for three blocks on a multiprocessor (9.0 has the
// shared memory for them, 8.0 for two): see flash.cuh.
FLASH(64, 2, 3)
