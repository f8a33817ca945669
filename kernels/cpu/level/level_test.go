package level

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		want string
		best Level
		got  Level
		err  string
	}{
		{"", AVX512, AVX512, ""},
		{"", Portable, Portable, ""},
		{"portable", AVX512, Portable, ""},
		{"AVX2", AVX512, AVX2, ""},
		{"avx512", AVX512, AVX512, ""},
		{"avx512", AVX2, AVX2, `SPILLWAY_SIMD: level: this CPU has no avx512; its best level is avx2`},
		{"sse9", AVX2, AVX2, `SPILLWAY_SIMD: level: no SIMD level "sse9"; levels are portable, avx2, avx512`},
	} {
		got, err := choose(c.want, c.best)
		require.Equal(t, c.got, got, "%q on %v", c.want, c.best)
		if c.err == "" {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, c.err)
		}
	}
}

// The environment is read at start, so each value needs a new process.
func TestEnvironment(t *testing.T) {
	if os.Getenv("LEVEL_TEST_CHILD") != "" {
		os.Stdout.WriteString(Current().String())
		if Err() != nil {
			os.Stdout.WriteString(" " + Err().Error())
		}
		for f := range features {
			if Has(f) && Current() == Portable {
				os.Stdout.WriteString(" feature at portable")
			}
		}
		os.Exit(0)
	}
	run := func(env string) string {
		cmd := exec.Command(os.Args[0], "-test.run=^TestEnvironment$")
		cmd.Env = append(os.Environ(), "LEVEL_TEST_CHILD=1", Env+"="+env)
		out, err := cmd.Output()
		require.NoError(t, err)
		return string(out)
	}
	require.Equal(t, Best().String(), run(""))
	require.Equal(t, "portable", run("portable"))
	require.Contains(t, run("nonsense"), `no SIMD level "nonsense"`)
	if Best() >= AVX2 {
		require.Equal(t, "avx2", run("avx2"))
	}
}

func TestNames(t *testing.T) {
	for l := Portable; l <= AVX512; l++ {
		got, err := Parse(l.String())
		require.NoError(t, err)
		require.Equal(t, l, got)
	}
	require.Equal(t, "Level(9)", Level(9).String())
	require.False(t, Has(-1))
	require.False(t, Has(features))
}
