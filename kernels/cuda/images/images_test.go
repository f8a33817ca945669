package images

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/kernels/cuda"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

func TestPackedFileIsReadAgain(t *testing.T) {
	want := []Image{{"a.cu", Hash("a"), []byte("code of a")}, {"b.cu", Hash("b"), []byte("code of b")}}
	file, err := Pack(want)
	require.NoError(t, err)
	again, err := Pack(want)
	require.NoError(t, err)
	require.Equal(t, file, again)
	got, err := Unpack(file)
	require.NoError(t, err)
	require.Equal(t, want, got)
	_, err = Unpack(file[:len(file)-5])
	require.ErrorContains(t, err, "embedded kernels")
}

// The images that a card can run depend on its generation and on the driver.
func TestArchitecturesOfACard(t *testing.T) {
	for _, c := range []struct {
		version, major int
		want           []string
	}{
		{12040, 9, []string{"sm_90", PTX}}, {13000, 8, []string{"sm_80", PTX}}, {11080, 9, []string{PTX}}, {12080, 10, []string{PTX}}, {12040, 7, nil},
	} {
		require.Equal(t, c.want, New(c.version, nil).archs(driver.Device{Major: c.major}))
	}
}

// A source that is not embedded goes to the other compiler, which is opened once and only when
// needed.
func TestOtherCompilerServesWhatIsMissing(t *testing.T) {
	opened := 0
	c := New(12040, func() (cuda.Compiler, error) { opened++; return nil, errors.New("no NVRTC") })
	require.Zero(t, opened)
	for range 2 {
		_, err := c.Compile("own.cu", "a program's own", driver.Device{Major: 9})
		require.ErrorContains(t, err, "no NVRTC")
	}
	require.Equal(t, 1, opened)
}
