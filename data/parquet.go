package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/parquet-go/parquet-go"
)

// eachRow calls give with each row of a Parquet file, encoded as JSON.
func (e *entry) eachRow(give func(row int, record []byte) error) (err error) {
	defer func() {
		if p := recover(); p != nil { // parquet-go panics on some damaged files
			err = fmt.Errorf("%s is damaged: %v", e.path, p)
		}
	}()
	f, err := e.open()
	if err != nil {
		return err
	}
	defer f.Close()
	at, ok := f.(io.ReaderAt)
	if !ok {
		return fmt.Errorf("%s is compressed as a whole, which Parquet files are not; decompress it first", e.path)
	}
	file, err := parquet.OpenFile(at, e.size)
	if err != nil {
		return fmt.Errorf("%s is not a Parquet file: %w", e.path, err)
	}
	r := parquet.NewGenericReader[any](file, file.Schema())
	defer r.Close()
	rows := make([]any, 64)
	for row := 1; ; {
		n, err := r.Read(rows)
		for _, v := range rows[:n] {
			record, err := json.Marshal(v)
			if err != nil {
				return fmt.Errorf("%s: %w", e.place(row), err)
			}
			if err := give(row, record); err != nil {
				return err
			}
			row++
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read %s: %w", e.path, err)
		}
	}
}
