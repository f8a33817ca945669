package data

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// put writes a file in a folder of the test.
func put(t testing.TB, name string, content []byte) string {
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, content, 0o644))
	return path
}

func marshal(t testing.TB, v any) []byte {
	out, err := json.Marshal(v)
	require.NoError(t, err)
	return out
}
