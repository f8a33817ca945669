// Package pages keeps few pages of the program's code and constants resident, and about equally
// many on every system at all times.
//
// At a page fault Linux makes a complete folio of the file resident (6.18), or 64 KiB of it. For
// one build 23 to 30 MiB were resident, depending on how the file had entered the page cache. With
// mappings of 64 KiB each it is at most that at a time. Importing the package divides the program's
// mappings.
package pages
