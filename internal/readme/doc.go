// Package readme tests the documentation: its test extracts every command from the README and
// the pages beside it, and runs it.
package readme
