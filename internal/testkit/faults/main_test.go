package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A fault whose text has changed must follow it: this fails, and names it.
func TestEachFaultIsFound(t *testing.T) {
	list, err := read(".")
	require.NoError(t, err)
	require.NoError(t, locate("../../..", list))
	require.GreaterOrEqual(t, len(list), 60)
}

func TestPlaces(t *testing.T) {
	require.Equal(t, [][2]int{{5, 16}}, places("x {\n\ta := 1\n\tb++\n}", "a := 1\nb++"), "indentation does not count")
	require.Len(t, places("a+b a+b", "a+b"), 2)
	require.Empty(t, places("aab", "a+b"), "the text is no pattern")
}

func TestReadAndLocate(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("a.go", "package a\n\nvar x = 1\nvar y = 1\n")
	write("a_test.go", "package a\n\nvar z = 7\n")
	for text, wrong := range map[string]string{
		"== one\nin: a.go\n-- old\nvar x = 1\n-- new\nvar x = 2\n":     "",
		"== one\n-- old\nvar z = 7\n-- new\nvar z = 8\n":               "nowhere",
		"== one\n-- old\n= 1\n-- new\n= 2\n":                           "2 times",
		"== one\nin: b.go\n-- old\nvar x = 1\n-- new\nvar x = 2\n":     "nowhere",
		"== one\n-- old\nx\n-- new\nx\n":                               "changes nothing",
		"== one\n-- old\nx\n-- new\ny\n== one\n-- old\nx\n-- new\ny\n": "another fault",
		"-- old\nx\n": "before the first fault",
	} {
		write("f.txt", text)
		list, err := read(dir)
		if err == nil {
			err = locate(dir, list)
		}
		if wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, wrong)
		}
	}
}
