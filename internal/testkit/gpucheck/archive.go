package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
	"strings"
)

// archive is the file in the results folder that contains all other results and the logs.
const archive = "results.tar.gz"

// keep writes the results so far and packs them with the logs, so that one file has everything if
// the program is interrupted.
func (b *bundle) keep(doc *document) error {
	if err := doc.write(b.out); err != nil {
		return err
	}
	return packFolders(filepath.Join(b.out, archive), b.out, b.work)
}

// packFolders packs the results and the logs, each in its folder. It writes a temporary file, so
// that the previous archive stays until the new one is complete.
func packFolders(to, results, work string) error {
	f, err := os.Create(to + ".tmp")
	if err != nil {
		return err
	}
	z := gzip.NewWriter(f)
	w := tar.NewWriter(z)
	var list []string
	for _, pattern := range []string{filepath.Join(results, "results.*"), filepath.Join(work, "logs", "*.txt")} {
		found, e := filepath.Glob(pattern)
		err, list = errors.Join(err, e), append(list, found...)
	}
	for _, path := range list {
		if err != nil || strings.HasPrefix(path, to) {
			continue
		}
		err = func() error {
			text, err := os.ReadFile(path) // whole: a log may grow meanwhile
			if err != nil {
				return err
			}
			name := filepath.Base(path)
			if filepath.Ext(path) == ".txt" {
				name = "logs/" + name
			}
			if err := w.WriteHeader(&tar.Header{Name: "results/" + name, Mode: 0o644, Size: int64(len(text)), Format: tar.FormatPAX}); err != nil {
				return err
			}
			_, err = w.Write(text)
			return err
		}()
	}
	for _, end := range []func() error{w.Close, z.Close, f.Close} {
		if e := end(); err == nil {
			err = e
		}
	}
	if err != nil {
		return err
	}
	return os.Rename(to+".tmp", to)
}
