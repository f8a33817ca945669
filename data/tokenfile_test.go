package data

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

func uint16s(tokens ...uint16) []byte {
	var out []byte
	for _, t := range tokens {
		out = binary.LittleEndian.AppendUint16(out, t)
	}
	return out
}

// llmc returns a token file with llm.c's header.
func llmc(magic, version, count uint32, tokens []byte) []byte {
	out := make([]byte, headerBytes)
	binary.LittleEndian.PutUint32(out, magic)
	binary.LittleEndian.PutUint32(out[4:], version)
	binary.LittleEndian.PutUint32(out[8:], count)
	return append(out, tokens...)
}

func TestTokenFileLayouts(t *testing.T) {
	raw := uint16s(1, 2, 65535, 4)
	wide := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, 128000), 1<<31-1)
	for name, tc := range map[string]struct {
		content []byte
		want    []int32
	}{
		"raw":      {raw, []int32{1, 2, 65535, 4}},
		"llm.c":    {llmc(20240520, 1, 4, raw), []int32{1, 2, 65535, 4}},
		"llama 3":  {llmc(20240801, 7, 2, wide), []int32{128000, 1<<31 - 1}},
		"shortest": {uint16s(7, 8), []int32{7, 8}},
	} {
		path := put(t, "t.bin", tc.content)
		b, err := Open(context.Background(), path, Options{})
		require.NoError(t, err, name)
		require.Equal(t, int64(len(tc.want)), b.Len())
		got := make([]int32, len(tc.want))
		require.NoError(t, b.Tokens(got, 0))
		require.Equal(t, tc.want, got, name)
		require.NoError(t, b.Tokens(got[:1], 1))
		require.Equal(t, tc.want[1], got[0])
		require.NoError(t, b.Tokens(nil, b.Len()))
		for _, bad := range []int64{-1, b.Len(), 1 << 62, -1 << 62} {
			require.ErrorContains(t, b.Tokens(got[:1], bad), path)
		}
		require.Equal(t, path, b.Name())
		require.NoError(t, b.Close())
		require.Error(t, b.Tokens(got[:1], 0), "closed")
	}
}

func TestTokenFileErrors(t *testing.T) {
	tokens := uint16s(1, 2, 3, 4)
	for name, tc := range map[string]struct {
		content []byte
		vocab   int
		want    []string
	}{
		"empty":            {nil, 0, []string{"0 tokens"}},
		"one token":        {uint16s(1), 0, []string{"1 tokens", "2 at least"}},
		"odd":              {[]byte{1, 2, 3, 4, 5}, 0, []string{"5 bytes", "offset 4", "uint16"}},
		"cut header":       {llmc(20240520, 1, 4, nil)[:1000], 0, []string{"20240520", "1000 bytes", "1024"}},
		"header only":      {llmc(20240520, 1, 0, nil), 0, []string{"0 tokens"}},
		"version":          {llmc(20240520, 2, 4, tokens), 0, []string{"offset 4", "is 2", "must be 1"}},
		"llama version":    {llmc(20240801, 1, 2, tokens), 0, []string{"is 1", "must be 7"}},
		"count too high":   {llmc(20240520, 1, 5, tokens), 0, []string{"offset 8", "5 tokens", "1034 bytes", "has 1032", "4 tokens"}},
		"count too low":    {llmc(20240520, 1, 3, tokens), 0, []string{"3 tokens"}},
		"negative count":   {llmc(20240520, 1, 1<<32-1, tokens), 0, []string{"-1 tokens"}},
		"beyond":           {uint16s(1, 255, 256, 300), 256, []string{"token 2 ", "offset 4", "is 256", "vocabulary of 256", "0 to 255"}},
		"beyond, header":   {llmc(20240520, 1, 4, uint16s(1, 2, 3, 50257)), 50257, []string{"token 3 ", "offset 1030", "is 50257"}},
		"beyond, wide":     {llmc(20240801, 7, 2, []byte{1, 0, 0, 0, 0, 0, 1, 0}), 65536, []string{"token 1 ", "offset 1028", "is 65536"}},
		"beyond int32":     {llmc(20240801, 7, 2, []byte{1, 0, 0, 0, 255, 255, 255, 255}), math.MaxInt, []string{"token 1 ", "is 4294967295"}},
		"beyond, no vocab": {llmc(20240801, 7, 2, []byte{1, 0, 0, 0, 255, 255, 255, 255}), 0, nil},
	} {
		path := put(t, "bad.bin", tc.content)
		b, err := Open(context.Background(), path, Options{Vocab: tc.vocab})
		if tc.want == nil {
			require.NoError(t, err)
			require.ErrorContains(t, b.Tokens(make([]int32, 2), 0), "token 1 is 4294967295")
			require.NoError(t, b.Close())
			continue
		}
		require.ErrorContains(t, err, path, name)
		for _, w := range tc.want {
			require.ErrorContains(t, err, w, name)
		}
	}
	_, err := Open(context.Background(), "no/such.bin", Options{})
	require.ErrorContains(t, err, "no/such.bin does not exist")
	_, err = OpenTokenFile("/dev/null", 0)
	require.ErrorContains(t, err, "regular")
}

// TestTokenFileScanIsWhole checks that the vocabulary check covers a file of several buffers.
func TestTokenFileScanIsWhole(t *testing.T) {
	content := make([]byte, 3<<18)
	binary.LittleEndian.PutUint16(content[len(content)-2:], 9)
	path := put(t, "t.bin", content)
	_, err := OpenTokenFile(path, 9)
	require.ErrorContains(t, err, fmt.Sprintf("token %d (at offset %d) is 9", len(content)/2-1, len(content)-2))
	b, err := OpenTokenFile(path, 10)
	require.NoError(t, err)
	require.NoError(t, b.Close())
}

func TestTokenFileCutWhileOpen(t *testing.T) {
	path := put(t, "t.bin", make([]byte, 1<<16))
	b, err := OpenTokenFile(path, 0)
	require.NoError(t, err)
	defer b.Close()
	require.NoError(t, os.Truncate(path, 0))
	err = b.Tokens(make([]int32, 16), 20000)
	require.ErrorContains(t, err, path)
	require.ErrorContains(t, err, "became shorter")
}

func TestTokensAllocateNothing(t *testing.T) {
	b, err := OpenTokenFile(put(t, "t.bin", make([]byte, 1<<12)), 0)
	require.NoError(t, err)
	defer b.Close()
	dst := make([]int32, 64)
	require.Zero(t, alloctest.PerRun(100, func() { b.Tokens(dst, 5) }))
}

func FuzzTokenFile(f *testing.F) {
	f.Add(uint16s(1, 2, 3), 10)
	f.Add(llmc(20240520, 1, 2, uint16s(3, 4)), 4)
	f.Add(llmc(20240801, 7, 2, uint16s(3, 0, 0, 0xffff)), 0)
	f.Add(llmc(20240801, 7, 1<<31-1, uint16s(3, 0, 0, 0xffff)), 0)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte, vocab int) {
		path := dir + "/f.bin"
		require.NoError(t, os.WriteFile(path, content, 0o644))
		b, err := OpenTokenFile(path, vocab)
		if err != nil {
			require.ErrorContains(t, err, path)
			return
		}
		defer b.Close()
		require.GreaterOrEqual(t, b.Len(), int64(2))
		dst := make([]int32, b.Len())
		if b.Tokens(dst, 0) != nil {
			require.True(t, vocab <= 0, "checked tokens can be read")
			return
		}
		for _, x := range dst {
			require.GreaterOrEqual(t, x, int32(0))
			require.True(t, vocab <= 0 || int(x) < vocab)
		}
	})
}
