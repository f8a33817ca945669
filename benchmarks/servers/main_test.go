package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/presets"
)

// What is kept has every preset and every cluster, each job once, and nothing that
// leaves the system less than its part of a server.
func TestKeptRowsStayWithinTheirServers(t *testing.T) {
	f, err := os.Open("servers.csv")
	require.NoError(t, err)
	defer f.Close()
	rows, err := rowsOf(f)
	require.NoError(t, err)
	models, on, seen := map[string]bool{}, map[string]bool{}, map[[2]string]bool{}
	hosts := 0
	for _, r := range rows {
		job := [2]string{r.model, r.cluster}
		require.False(t, seen[job], "%v is there twice", job)
		seen[job], models[r.model], on[r.cluster] = true, true, true
		require.Positive(t, r.memory, job)
		require.True(t, r.within(), "%v: %s takes %d of a server's %d bytes", job, r.flags, r.host, r.memory)
		if strings.Contains(r.flags, "=host") {
			hosts++
		}
	}
	require.Len(t, models, len(presets.List()))
	require.Len(t, on, len(clusters))
	require.Len(t, rows, len(models)*len(on), "each on all")
	require.Positive(t, hosts, "some use the host")
}

// A row that takes more than the server's part for its ranks is found.
func TestOverIsFound(t *testing.T) {
	doc := func(peak string) []byte {
		return []byte(`{"recommended":{"flags":"--zero 3","plan":{"host":{"peak_bytes":` + peak + `,"outside_bytes":500}}},"server":{"ranks":4,"memory_bytes":64000}}`)
	}
	r, err := parse("gpt2", clusters[1], doc("14500"))
	require.NoError(t, err)
	require.Equal(t, row{"gpt2", clusters[1], "--zero 3", 60000, 64000}, r)
	require.True(t, r.within())
	r, err = parse("gpt2", clusters[1], doc("14501"))
	require.NoError(t, err)
	require.False(t, r.within())
	r, err = parse("gpt2", clusters[1], []byte(`{"recommended":null,"server":{"ranks":4,"memory_bytes":64000}}`))
	require.NoError(t, err)
	require.Empty(t, r.flags)
	_, err = rowsOf(strings.NewReader("a,b,c,1\n"))
	require.ErrorContains(t, err, "line 1: 4 fields; 5 are needed")
}
