// Package pages keeps few of the program's own pages resident, its code and constants, and about as
// many on every system and at every time.
//
// Linux makes all of a file's folio resident at a page fault (6.18), or 64 KiB of it: of one build,
// 23 to 30 MiB were, by how the file had come into the page cache. In mappings of 64 KiB each it is
// no more than that at a time. Importing the package divides the program's mappings.
package pages
