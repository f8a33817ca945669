package pages_test

import (
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/pages"
)

func TestPlacesAreAll(t *testing.T) {
	top, seen := filepath.Join("..", "..", ".."), map[string]bool{}
	require.NoError(t, filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == top {
			return err
		}
		name, err := filepath.Rel(top, path)
		place, _, _ := strings.Cut(filepath.ToSlash(name), "/")
		switch {
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") || strings.HasPrefix(d.Name(), "spillway-demo") || d.Name() == "testdata"):
			return fs.SkipDir
		case err != nil || d.IsDir() || filepath.Ext(path) != ".md":
			return err
		}
		seen[place] = true
		require.True(t, slices.Contains(pages.Places, place), "%s is a page where none is looked for", name)
		return nil
	}))
	require.Len(t, seen, len(pages.Places))
}
