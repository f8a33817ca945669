package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A campaign goes on from its log: with its seed, and without the kills it has.
func TestJournalGoesOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	seed := uint64(0)
	l, err := openJournal(path, &seed)
	require.NoError(t, err)
	require.NotZero(t, seed)
	for _, k := range []kill{
		{Number: 0, Configuration: "a", Rank: allRanks, Aimed: true, Amid: true, Step: 6, Lost: 2},
		{Number: 3, Configuration: "b", Rank: 1, Lost: 3},
		{Number: 2, Configuration: "b", Rank: allRanks, Step: 3, Lost: 1},
	} {
		_, err := l.add(k)
		require.NoError(t, err)
	}
	require.NoError(t, l.close())

	again := uint64(0)
	l, err = openJournal(path, &again)
	require.NoError(t, err)
	require.Equal(t, seed, again)
	require.Equal(t, 3, l.len())
	require.False(t, l.has(1))
	require.True(t, l.has(2))
	var out strings.Builder
	require.NoError(t, l.table(&out, []*job{{name: "a"}, {name: "b", ranks: 2}}))
	var rows []string
	for line := range strings.Lines(out.String()) {
		rows = append(rows, strings.Join(strings.Fields(line), " "))
	}
	require.Equal(t, []string{"a all 1 1 1 0 2.0 2", "b all 1 0 0 0 1.0 1", "b one rank 1 0 0 1 3.0 3"}, rows[1:])
	require.NoError(t, l.close())

	other := seed + 1
	_, err = openJournal(path, &other)
	require.ErrorContains(t, err, "is of seed")
	require.NoError(t, os.WriteFile(path, []byte("{}\n"), 0o600))
	_, err = openJournal(path, &again)
	require.ErrorContains(t, err, "no log of kills")
}
