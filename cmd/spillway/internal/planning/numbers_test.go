package planning

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRoughNumbers(t *testing.T) {
	for v, want := range map[float64]string{1.389: "1.4 s", 0.0469: "47 ms", 0.00469: "4.7 ms", 47.2: "47 s", 0.00002: "20 µs", 9.99: "10 s", 130: "2 min", 3700: "62 min"} {
		require.Equal(t, want, roughSeconds(v))
	}
	for v, want := range map[float64]string{100069138: "1,158 days", 200000: "2.3 days", 172799: "47h59m59s", 1e12: "11,574,074 days"} {
		require.Equal(t, want, seconds(v))
	}
	require.Equal(t, "1.4–2.6 s", between("1.4 s", "2.6 s"))
	require.Equal(t, "950 ms–1.2 s", between("950 ms", "1.2 s"))
	require.Equal(t, "3 s", between("3 s", "3 s"))
	require.Zero(t, rough(0))
}
