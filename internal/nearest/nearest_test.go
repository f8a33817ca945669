package nearest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNames(t *testing.T) {
	entries := [][]string{{"gpt2", "gpt2-small"}, {"gpt2-xl"}, {"llama-2-7b", "llama2-7b"}, {"llama-2-70b"}}
	for key, want := range map[string]string{"gpt9": "gpt2", "gpt2-smal": "gpt2", "gpt2-xxl": "gpt2-xl", "lama2-7b": "llama-2-7b", "llama-2-70": "llama-2-70b"} {
		require.Equal(t, want, Names(key, entries, 3)[0], key)
	}
	require.Len(t, Names("x", entries, 3), 3)
	require.Len(t, Names("x", entries, 9), 4)
	require.Len(t, Names(strings.Repeat("x", 1<<20), entries, 1), 1)
	// With equal distances, the longer common prefix is first.
	require.Equal(t, []string{"ab", "xb"}, Names("ac", [][]string{{"xb"}, {"ab"}}, 2))
}

func TestEditDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "abc", 0}, {"kitten", "sitting", 3}, {"h100", "h200", 1}} {
		require.Equal(t, c.want, editDistance(c.a, c.b))
		require.Equal(t, c.want, editDistance(c.b, c.a))
	}
}

func TestDivisors(t *testing.T) {
	for _, c := range []struct {
		n, k int
		want string
	}{{32, 5, "4 or 8"}, {6, 4, "3 or 6"}, {8, 3, "2 or 4"}, {8, 16, "8"}, {7, 3, "1 or 7"}, {49, 8, "7 or 49"}, {1, 5, "1"}, {12, 0, "1"}} {
		require.Equal(t, c.want, Divisors(c.n, c.k), "%d, %d", c.n, c.k)
	}
}
