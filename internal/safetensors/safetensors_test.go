package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	oracle "github.com/maruel/safetensors"
	"github.com/stretchr/testify/require"
	"github.com/x448/float16"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

// file returns the bytes of a safetensors file with the given header and data.
func file(header string, data []byte) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(out, header...), data...)
}

func put(t *testing.T, name string, data []byte) string {
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, data, 0o644))
	return path
}

func TestF16(t *testing.T) {
	for h := range 1 << 16 {
		want := float16.Frombits(uint16(h)).Float32()
		got := fromF16(uint16(h))
		if want != want {
			require.True(t, got != got, "%#x", h)
			continue
		}
		require.Equal(t, math.Float32bits(want), math.Float32bits(got), "%#x", h)
	}
}

func TestBF16(t *testing.T) {
	for b := range 1 << 16 { // every bfloat16 is unchanged
		x := math.Float32frombits(uint32(b) << 16)
		if x == x {
			require.Equal(t, uint16(b), toBF16(x))
		} else {
			require.True(t, math.IsNaN(float64(math.Float32frombits(uint32(toBF16(x))<<16))))
		}
	}
	for bits, want := range map[uint32]uint16{
		0x3f808000: 0x3f80, // a tie, to even: down
		0x3f818000: 0x3f82, // a tie, to even: up
		0x3f808001: 0x3f81,
		0x3f807fff: 0x3f80,
		0x7f7fffff: 0x7f80, // the largest float32 rounds to infinity
		0x7f800001: 0x7fc0, // a NaN whose payload would be lost
		0x80000001: 0x8000,
	} {
		require.Equal(t, want, toBF16(math.Float32frombits(bits)), "%#x", bits)
	}
}

// Files written by the reference are read, with every float type and any order of the header.
func TestReadsWhatOthersWrite(t *testing.T) {
	f32, f16, bf16 := []byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0}, []byte{0, 0x3c, 0, 0xc0, 1, 0}, []byte{0x80, 0x3f, 0, 0xc0}
	var buf bytes.Buffer
	require.NoError(t, (&oracle.File{Metadata: map[string]string{"k": "v"}, Tensors: []oracle.Tensor{
		{Name: "a", DType: oracle.F32, Shape: []uint64{2, 1}, Data: f32},
		{Name: "b", DType: oracle.F16, Shape: []uint64{3}, Data: f16},
		{Name: "c", DType: oracle.BF16, Shape: []uint64{2}, Data: bf16},
		{Name: "mask", DType: oracle.U8, Shape: []uint64{2, 2}, Data: make([]byte, 4)},
		{Name: "empty", DType: oracle.F32, Shape: []uint64{0, 7}},
	}}).Serialize(&buf))
	path := put(t, "m.safetensors", buf.Bytes())
	r, err := Open(path)
	require.NoError(t, err)
	defer r.Close()
	require.Equal(t, path, r.Path())
	require.Equal(t, map[string]string{"k": "v"}, r.Metadata())
	require.Len(t, r.Tensors(), 5)
	for name, want := range map[string][]float32{"a": {1, -2}, "b": {1, -2, 1.0 / (1 << 24)}, "c": {1, -2}, "empty": {}} {
		tensor, ok := r.Tensor(name)
		require.True(t, ok)
		got := make([]float32, tensor.Elements())
		require.NoError(t, r.ReadFloat32(name, 0, got))
		require.Equal(t, want, got, name)
		if len(want) > 1 {
			require.NoError(t, r.ReadFloat32(name, 1, got[:1]))
			require.Equal(t, want[1], got[0])
		}
	}
	dst := make([]float32, 3)
	require.ErrorContains(t, r.ReadFloat32("mask", 0, dst), `"mask" is U8`)
	require.ErrorContains(t, r.ReadFloat32("nope", 0, dst), `"nope"`)
	for _, start := range []int64{-1, 1, 3, math.MaxInt64, math.MinInt64} {
		require.ErrorContains(t, r.ReadFloat32("a", start, dst), "2 elements")
	}
	require.Zero(t, alloctest.PerRun(10, func() { r.ReadFloat32("b", 0, dst) }))

	// The format does not order the header.
	path = put(t, "m.safetensors", file(`{"y":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   `, f32))
	r2, err := Open(path)
	require.NoError(t, err)
	defer r2.Close()
	require.NoError(t, r2.ReadFloat32("y", 0, dst[:1]))
	require.Equal(t, float32(-2), dst[0])
}

func TestTruncatedAfterOpen(t *testing.T) {
	path := put(t, "m.safetensors", file(`{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, make([]byte, 8)))
	r, err := Open(path)
	require.NoError(t, err)
	defer r.Close()
	require.NoError(t, os.Truncate(path, 20))
	require.ErrorContains(t, r.ReadFloat32("x", 0, make([]float32, 2)), "shorter")
}

func TestMalformed(t *testing.T) {
	tensor := func(dtype, shape, offsets string) string {
		return fmt.Sprintf(`{"w":{"dtype":%s,"shape":%s,"data_offsets":%s}}`, dtype, shape, offsets)
	}
	eight := make([]byte, 8)
	for name, tc := range map[string]struct {
		data []byte
		want string
	}{
		"empty":             {nil, "0 bytes"},
		"seven bytes":       {make([]byte, 7), "7 bytes"},
		"huge header":       {binary.LittleEndian.AppendUint64(nil, math.MaxUint64), "at most"},
		"long header":       {binary.LittleEndian.AppendUint64(nil, 1000), "cut short"},
		"not JSON":          {file("hello", nil), "JSON"},
		"cut JSON":          {file(`{"w":`, nil), `"w"`},
		"cut JSON 2":        {file(`{`, nil), "JSON"},
		"array":             {file(`[]`, nil), "object"},
		"text after":        {file(`{} x`, nil), "follows"},
		"bad metadata":      {file(`{"__metadata__":{"a":1}}`, nil), "__metadata__"},
		"no dtype":          {file(`{"w":{"shape":[2],"data_offsets":[0,8]}}`, eight), "no dtype"},
		"no shape":          {file(`{"w":{"dtype":"F32","data_offsets":[0,8]}}`, eight), "no shape"},
		"no offsets":        {file(`{"w":{"dtype":"F32","shape":[2]}}`, eight), "data_offsets"},
		"three offsets":     {file(tensor(`"F32"`, "[2]", "[0,4,8]"), eight), "two numbers"},
		"unknown dtype":     {file(tensor(`"F128"`, "[2]", "[0,8]"), eight), `"F128"`},
		"negative shape":    {file(tensor(`"F32"`, "[-2]", "[0,8]"), eight), "negative"},
		"huge shape":        {file(tensor(`"F32"`, "[4294967296,4294967296]", "[0,8]"), eight), "2^63"},
		"huger shape":       {file(tensor(`"F32"`, "[99999999999999999999]", "[0,8]"), eight), `"w"`},
		"wrapping shape":    {file(tensor(`"F32"`, "[2147483648,2147483648,4]", "[0,0]"), eight), "2^63"},
		"fraction":          {file(tensor(`"F32"`, "[2.5]", "[0,8]"), eight), `"w"`},
		"many dimensions":   {file(tensor(`"F32"`, "["+strings.Repeat("1,", 99)+"2]", "[0,8]"), eight), "100 dimensions"},
		"shape vs offsets":  {file(tensor(`"F32"`, "[3]", "[0,8]"), eight), "12 bytes"},
		"reversed offsets":  {file(tensor(`"F32"`, "[2]", "[8,0]"), eight), "not a range"},
		"negative offsets":  {file(tensor(`"F32"`, "[2]", "[-8,0]"), eight), "not a range"},
		"cut data":          {file(tensor(`"F32"`, "[2]", "[0,8]"), eight[:7]), "cut short"},
		"longer data":       {file(tensor(`"F32"`, "[1]", "[0,4]"), eight), "4 bytes follow"},
		"hole":              {file(tensor(`"F32"`, "[1]", "[4,8]"), eight), "no tensor"},
		"overlap":           {file(`{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, eight), "overlaps"},
		"duplicate":         {file(`{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, eight), "twice"},
		"entry not objects": {file(`{"w":7}`, nil), `"w"`},
	} {
		path := put(t, "bad.safetensors", tc.data)
		_, err := Open(path)
		require.ErrorContains(t, err, tc.want, name)
		require.ErrorContains(t, err, path, name)
		require.NotContains(t, err.Error(), "\n")
	}
	_, err := Open(t.TempDir())
	require.ErrorContains(t, err, FileName)
	_, err = Open(filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "none")
	_, err = Open("/dev/null")
	require.ErrorContains(t, err, "regular")
}

func TestSharded(t *testing.T) {
	dir := t.TempDir()
	shard := func(name string, x float32, tensors ...string) {
		var list []Tensor
		for _, n := range tensors {
			list = append(list, Tensor{n, F32, []int64{1}})
		}
		w, err := Create(filepath.Join(dir, name), list, nil)
		require.NoError(t, err)
		for i, n := range tensors {
			require.NoError(t, w.WriteFloat32(n, 0, []float32{x + float32(i)}))
		}
		require.NoError(t, w.Commit())
	}
	shard("s1.safetensors", 10, "a", "b")
	shard("s2.safetensors", 20, "b", "c") // its b is not the index's
	index := func(s string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, IndexName), []byte(s), 0o644))
	}
	index(`{"metadata":{"total_size":12},"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors"}}`)
	r, err := Open(dir)
	require.NoError(t, err)
	var got []float32
	for _, tensor := range r.Tensors() {
		x := make([]float32, 1)
		require.NoError(t, r.ReadFloat32(tensor.Name, 0, x))
		got = append(got, x[0])
	}
	require.Equal(t, []float32{10, 11, 21}, got)
	require.NoError(t, r.Close())

	for text, want := range map[string]string{
		`{"weight_map":{"a":"s1.safetensors","z":"s2.safetensors"}}`: `"z"`,
		`{"weight_map":{"a":"s3.safetensors"}}`:                      "s3.safetensors is missing",
		`{"weight_map":{"a":"../s1.safetensors"}}`:                   "beside the index",
		`{"weight_map":{"a":"/etc/passwd"}}`:                         "beside the index",
		`{"weight_map":{"a":7}}`:                                     "weight_map",
		`{"weight_map":{}}`:                                          "weight_map",
		`{}`:                                                         "weight_map",
		`x`:                                                          "JSON",
	} {
		index(text)
		_, err := Open(dir)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, dir)
	}
	// If both exist, a single file is used and not an index, as in transformers.
	shard(FileName, 30, "only")
	r, err = Open(dir)
	require.NoError(t, err)
	require.Len(t, r.Tensors(), 1)
	require.NoError(t, r.Close())
}

func TestWriteInRanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	dir := t.TempDir()
	path := filepath.Join(dir, "out.safetensors")
	list := []Tensor{{"h.0.w", F32, []int64{97, 411}}, {"bf", BF16, []int64{70001}}, {"scalar", F32, nil}, {"empty", BF16, []int64{3, 0}}, {`odd "name" é`, BF16, []int64{1}}}
	data := map[string][]float32{}
	w, err := Create(path, list, nil)
	require.NoError(t, err)
	type job struct {
		name  string
		start int64
		src   []float32
	}
	var jobs []job
	for _, tensor := range list {
		x := make([]float32, tensor.Elements())
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
		data[tensor.Name] = x
		for at := 0; at < len(x); {
			n := min(1+rng.IntN(60000), len(x)-at)
			jobs = append(jobs, job{tensor.Name, int64(at), x[at : at+n]})
			at += n
		}
	}
	rng.Shuffle(len(jobs), func(i, j int) { jobs[i], jobs[j] = jobs[j], jobs[i] })
	errs := make(chan error)
	for _, j := range jobs {
		go func() { errs <- w.WriteFloat32(j.name, j.start, j.src) }()
	}
	for range jobs {
		require.NoError(t, <-errs)
	}
	require.NoFileExists(t, path)
	require.NoError(t, w.Commit())
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "no temporary file stays")

	r, err := Open(path)
	require.NoError(t, err)
	defer r.Close()
	require.Equal(t, "pt", r.Metadata()["format"])
	for _, tensor := range list {
		got := make([]float32, tensor.Elements())
		require.NoError(t, r.ReadFloat32(tensor.Name, 0, got))
		want := data[tensor.Name]
		if tensor.DType == BF16 {
			want = append([]float32{}, want...)
			for i, x := range want {
				want[i] = math.Float32frombits(uint32(toBF16(x)) << 16)
			}
		}
		require.Equal(t, want, got, tensor.Name)
	}
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	parsed, err := oracle.Parse(raw)
	require.NoError(t, err)
	require.Len(t, parsed.Tensors, len(list))
	require.Zero(t, (8+binary.LittleEndian.Uint64(raw))%8)
}

func TestWriterRefuses(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "out.safetensors")
	require.NoError(t, os.WriteFile(path, []byte("before"), 0o644))
	for _, bad := range [][]Tensor{{{"a", "F16", []int64{1}}}, {{"a", F32, []int64{-1}}}, {{"a", F32, nil}, {"a", F32, nil}}, {{"__metadata__", F32, nil}}, {{"a", F32, []int64{1 << 40, 1 << 40}}}, {{"a", F32, []int64{1 << 60}}, {"b", F32, []int64{1 << 60}}}} {
		_, err := Create(path, bad, nil)
		require.ErrorContains(t, err, path)
	}
	w, err := Create(path, []Tensor{{"a", F32, []int64{10}}, {"b", F32, []int64{1}}}, nil)
	require.NoError(t, err)
	two := make([]float32, 2)
	require.NoError(t, w.WriteFloat32("a", 2, two))
	require.NoError(t, w.WriteFloat32("a", 6, two))
	for start, ok := range []bool{true, false, false, false, true} { // 0..1, 1..2, 2..3, 3..4, 4..5
		err := w.WriteFloat32("a", int64(start), two)
		if ok {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, "already written")
		}
	}
	require.ErrorContains(t, w.WriteFloat32("a", 0, make([]float32, 10)), "already written")
	require.ErrorContains(t, w.WriteFloat32("a", 7, two), "elements 7 to 8 were already")
	require.ErrorContains(t, w.WriteFloat32("a", 9, two), "outside")
	require.ErrorContains(t, w.WriteFloat32("a", -1, two), "outside")
	require.ErrorContains(t, w.WriteFloat32("z", 0, two), "not declared")
	require.ErrorContains(t, w.Commit(), `"a": elements 8 to 10 of 10 were not written`)
	require.Error(t, w.Commit())
	require.Error(t, w.WriteFloat32("b", 0, two[:1]))
	w.Abort()
	old, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "before", string(old))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	_, err = Create(filepath.Join(dir, "no", "x"), nil, nil)
	require.ErrorContains(t, err, "no")
}

func FuzzOpen(f *testing.F) {
	f.Add(file(`{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"v":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}`, make([]byte, 14)))
	f.Add(file(`{"w":{"dtype":"F16","shape":[0,9223372036854775807,9223372036854775807],"data_offsets":[0,0]}}`, nil))
	f.Add(file(`{}`, nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, _, err := parseHeader(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			require.NotContains(t, err.Error(), "\n")
			return
		}
		var total int64
		for _, e := range entries {
			require.GreaterOrEqual(t, e.begin, int64(8))
			require.LessOrEqual(t, e.end, int64(len(data)))
			require.Equal(t, e.end-e.begin, e.Elements()*sizes[e.DType])
			total += e.end - e.begin
		}
		var n uint64 = binary.LittleEndian.Uint64(data)
		require.Equal(t, int64(len(data)), 8+int64(n)+total)
		require.True(t, json.Valid(bytes.TrimSpace(data[8:8+n])))
	})
}
