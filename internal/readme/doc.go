// Package readme tests the documentation: its test extracts the commands of the README and the
// other pages, and runs those that environment variables select.
package readme
