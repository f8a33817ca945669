package tensors

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"
)

const tied = "../testdata/llama-tied"

// What is loaded and saved is the same file, and NumPy's format carries it.
func TestRoundTrip(t *testing.T) {
	weights, err := Load(context.Background(), tied)
	require.NoError(t, err)
	require.Len(t, weights, 20)
	path := filepath.Join(t.TempDir(), "model.safetensors")
	require.NoError(t, Save(path, weights))
	back, err := Load(context.Background(), filepath.Dir(path))
	require.NoError(t, err)
	require.Equal(t, slices.Sorted(maps.Keys(weights)), slices.Sorted(maps.Keys(back)))
	for name, w := range weights {
		require.Equal(t, w.Shape(), back[name].Shape(), name)
		require.Equal(t, w.Data(), back[name].Data(), name)
		var npy bytes.Buffer
		require.NoError(t, w.WriteNpy(&npy), name)
		read := new(tensor.Dense)
		require.NoError(t, read.ReadNpy(&npy), name)
		require.Equal(t, w.Data(), read.Data(), name)
	}
}

// A view, a transposed tensor, one of columns and a scalar are written as they read.
func TestSaveInOrder(t *testing.T) {
	counted := func(opts ...tensor.ConsOpt) *tensor.Dense {
		return tensor.New(append(opts, tensor.WithShape(3, 4), tensor.WithBacking(tensor.Range(tensor.Float32, 0, 12)))...)
	}
	turned := counted()
	require.NoError(t, turned.T())
	columns, err := counted().Slice(nil, tensor.S(1, 3))
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "w.safetensors")
	require.NoError(t, Save(path, map[string]*tensor.Dense{
		"rows": counted(), "turned": turned, "columns": columns.(*tensor.Dense),
		"fortran": counted(tensor.AsFortran(nil)), "scalar": tensor.New(tensor.FromScalar(float32(7))),
	}))
	back, err := Load(context.Background(), path)
	require.NoError(t, err)
	require.Equal(t, []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, back["rows"].Data())
	require.Equal(t, []float32{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}, back["turned"].Data())
	require.Equal(t, tensor.Shape{4, 3}, back["turned"].Shape())
	require.Equal(t, []float32{1, 2, 5, 6, 9, 10}, back["columns"].Data())
	require.Equal(t, []float32{0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11}, back["fortran"].Data())
	require.Equal(t, float32(7), back["scalar"].ScalarValue())
}

type oneParameter struct{ err error }

func (o oneParameter) Parameter(name string) ([]int64, []float32, error) {
	return []int64{2, 3}, []float32{0, 1, 2, 3, 4, 5}, o.err
}

func TestParameter(t *testing.T) {
	d, err := Parameter(oneParameter{}, "w")
	require.NoError(t, err)
	at, err := d.At(1, 2)
	require.NoError(t, err)
	require.Equal(t, float32(5), at)
	_, err = Parameter(oneParameter{errors.New("no parameter")}, "w")
	require.EqualError(t, err, "no parameter")
}

func TestRefusals(t *testing.T) {
	path := filepath.Join(t.TempDir(), "w.safetensors")
	double := tensor.New(tensor.WithShape(2), tensor.WithBacking([]float64{1, 2}))
	require.ErrorContains(t, Save(path, map[string]*tensor.Dense{"w": double}), `tensor "w" is not of float32`)
	require.ErrorContains(t, Save(path, map[string]*tensor.Dense{"w": nil}), `tensor "w" is not of float32`)
	_, err := os.Stat(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Load(context.Background(), t.TempDir())
	require.ErrorContains(t, err, "holds neither")
	_, err = Load(context.Background(), path)
	require.Error(t, err)
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = Load(gone, tied)
	require.ErrorIs(t, err, context.Canceled)
}

// The mean of two models' weights, which --init then takes ("model soup").
func Example() {
	ctx := context.Background()
	one, err := Load(ctx, "../testdata/llama-tied")
	if err != nil {
		fmt.Println(err)
		return
	}
	other, err := Load(ctx, "../testdata/llama-tied")
	if err != nil {
		fmt.Println(err)
		return
	}
	for name, w := range one {
		sum, err := w.Add(other[name])
		if err == nil {
			one[name], err = sum.MulScalar(float32(0.5), true)
		}
		if err != nil {
			fmt.Println(name, err)
			return
		}
	}
	dir, err := os.MkdirTemp("", "soup")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	if err := Save(filepath.Join(dir, "model.safetensors"), one); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(len(one), "tensors")
	// Output: 20 tensors
}

// store holds one parameter.
type store struct {
	shape  []int64
	values []float32
}

func (s *store) Parameter(name string) ([]int64, []float32, error) {
	if name != "w" {
		return nil, nil, errors.New("no such parameter")
	}
	return s.shape, slices.Clone(s.values), nil
}

func (s *store) SetParameter(_ string, values []float32) error {
	s.values = slices.Clone(values)
	return nil
}

func TestSet(t *testing.T) {
	s := &store{[]int64{2, 3}, make([]float32, 6)}
	turned := tensor.New(tensor.WithShape(3, 2), tensor.WithBacking([]float32{1, 4, 2, 5, 3, 6}))
	require.NoError(t, turned.T())
	require.NoError(t, Set(s, "w", turned))
	require.Equal(t, []float32{1, 2, 3, 4, 5, 6}, s.values)
	back, err := Parameter(s, "w")
	require.NoError(t, err)
	require.NoError(t, Set(s, "w", back))
	require.Equal(t, []float32{1, 2, 3, 4, 5, 6}, s.values)

	require.ErrorContains(t, Set(s, "v", back), "no such parameter")
	require.ErrorContains(t, Set(s, "w", nil), `"w": the tensor is not of float32`)
	require.ErrorContains(t, Set(s, "w", tensor.New(tensor.WithShape(2, 3), tensor.Of(tensor.Float64))), "not of float32")
	require.ErrorContains(t, Set(s, "w", tensor.New(tensor.WithShape(3, 2), tensor.Of(tensor.Float32))), "has shape (3, 2), want [2 3]")
}
