# llama.cpp's models of images and sound are 45 small files that share heavy headers: compiled twelve at a time, as llama.cpp compiles its own
# models. Given as CMAKE_PROJECT_llama.cpp_INCLUDE, so that the sources stay as they are; when the targets are known, cmake calls it.
function(unite_models target)
  if(TARGET ${target})
    get_target_property(sources ${target} SOURCES)
    list(FILTER sources EXCLUDE REGEX "models/.*\\.cpp$")
    get_target_property(folder ${target} SOURCE_DIR)
    list(TRANSFORM sources PREPEND ${folder}/)
    set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
  endif()
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL unite_models mtmd)
