// Package readme holds the documentation to what it says: its test takes every
// command out of the README and the pages beside it, and runs them.
package readme
