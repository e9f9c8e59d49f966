// Command racy has two goroutines write one variable, of which neither waits for the other.
package main

import "os"

var shared int

func main() {
	done := make(chan struct{})
	go func() {
		shared++
		close(done)
	}()
	shared++
	<-done
	os.Exit(len(os.Args) - 1)
}
