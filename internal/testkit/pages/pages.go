// Package pages knows where the project's pages lie.
package pages

// Places are the files and folders with pages, from the top of the repository. A test of
// this package finds others: one that reads the pages need not read the top, which
// changes with whatever is made there.
var Places = []string{"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "benchmarks", "docs", "examples"}
