// Package pages lists the files and folders that contain the project's pages.
package pages

// Places are the files and folders with pages, relative to the repository's root. A test of this
// package detects others. Tests that read the pages need not read the root, whose contents change
// with every temporary file.
var Places = []string{"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "benchmarks", "docs", "examples"}
